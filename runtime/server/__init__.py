"""`headrace serve`: models over HTTP, in the shape of OpenAI's API (docs/server.md).

    app.py        paths and what they share          models.py     what is served, loading
    routes.py     every path in one table            service.py    what each of them does
    page.py       the page at /, its files in page/  lanes.py      the live view of steps
    generate.py   a request to answers               responses.py   answers of /v1/responses
    schema.py     what requests may say              reply.py      what answers look like
    stream.py     events to a client that may leave  guard.py      who is let in
    problems.py   errors to statuses                 listen.py     sockets, signals, draining
    describe.py   the description of it all          answers.py    what that says of answers

Only the command imports this package, which needs the extra [server].
"""
