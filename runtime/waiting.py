"""Ways to wait for requests that block; `waiting_async` has their twins for an event loop.

All of them cancel what they started when they are left early, by an error or by being closed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from headrace.runtime.answer import Request
from headrace.runtime.completion import Completion, TokenDelta
from headrace.runtime.errors import QueueFullError
from headrace.runtime.worker import RequestHandle, Worker


def run_all(worker: Worker, requests: Sequence[Request]) -> list[Completion]:
    """Feed the queue as it takes them and wait for all; raises the first error in their order."""
    handles: list[RequestHandle] = []
    try:
        while len(handles) < len(requests):
            try:
                handles += worker.submit_many(requests[len(handles) :])
            except QueueFullError:
                room = threading.Event()
                worker.when_room(room.set)
                room.wait()
        return [handle.result() for handle in handles]
    finally:
        for handle in handles:
            handle.cancel()


def iterate(worker: Worker, request: Request) -> Iterator[TokenDelta]:
    """Submit at the first `next` and give the pieces as they come."""
    handle = worker.submit(request, streaming=True)
    try:
        yield from handle
    finally:
        handle.cancel()
