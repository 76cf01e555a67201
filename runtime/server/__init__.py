"""`headrace serve`: models over HTTP, in the shape of OpenAI's API (docs/server.md).

    app.py        routes and what is around them     models.py     what is served, loading
    generate.py   a request to answers               embed.py      a request to vectors
    schema.py     what requests may say              reply.py      what answers look like
    stream.py     events to a client that may leave  guard.py      who is let in
    problems.py   errors to statuses                 listen.py     sockets, signals, draining

Only the command imports this package, which needs the extra [server].
"""
