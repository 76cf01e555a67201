"""Ways to wait for requests on an event loop.

All of them cancel what they started when they are left early, by an error or by being closed. A
module of its own as asyncio, with the TLS that it imports, is 5 MB that most programs never use.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from functools import partial

from headrace.runtime.answer import Request
from headrace.runtime.completion import Completion, TokenDelta
from headrace.runtime.errors import QueueFullError
from headrace.runtime.worker import Listener, RequestHandle, Worker


async def arun_all(worker: Worker, requests: Sequence[Request]) -> list[Completion]:
    """`waiting.run_all` on an event loop."""
    loop = asyncio.get_running_loop()
    handles: list[RequestHandle] = []
    ends: list[asyncio.Future[None]] = [loop.create_future() for _ in requests]
    try:
        while len(handles) < len(requests):
            listeners = [_at_end(worker, end) for end in ends[len(handles) :]]
            try:
                handles += worker.submit_many(requests[len(handles) :], listeners)
            except QueueFullError:
                room = loop.create_future()
                worker.when_room(_on_loop(loop, partial(_resolve, room)))
                await room
        for end in ends:
            await end
        return [handle.result(0) for handle in handles]
    finally:
        for handle in handles:
            handle.cancel()


async def aiterate(worker: Worker, request: Request) -> AsyncGenerator[TokenDelta, None]:
    """`waiting.iterate` on an event loop."""
    loop = asyncio.get_running_loop()
    deltas: asyncio.Queue[TokenDelta | None] = asyncio.Queue()

    mailbox = worker.mailbox(loop)

    def listen(delta: TokenDelta | None) -> None:
        mailbox.post(partial(deltas.put_nowait, delta))

    handle = worker.submit(request, listener=listen)
    try:
        while (delta := await deltas.get()) is not None:
            yield delta
    finally:
        handle.cancel()
    handle.result(0)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _on_loop(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> Callable[[], None]:
    """`callback` as one that any thread may call, to no effect once the loop was closed."""

    def call() -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(callback)

    return call


def _at_end(worker: Worker, future: asyncio.Future[None]) -> Listener:
    """A listener that resolves `future` on its loop when the request ends."""
    mailbox = worker.mailbox(future.get_loop())

    def listen(delta: TokenDelta | None) -> None:
        if delta is None:
            mailbox.post(partial(_resolve, future))

    return listen
