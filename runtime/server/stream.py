"""Events to a client that may leave, or read too slowly, at any time (server-sent events)."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from headrace.runtime.errors import RequestError
from headrace.runtime.server.problems import as_problem

logger = logging.getLogger(__name__)

T = TypeVar("T")

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class ClientGoneError(RequestError):
    """Nobody waits for the answer any more."""


class ClientTooSlowError(RequestError):
    """More is waiting for a client than is kept for one, or it took nothing for too long."""


def event(data: object, name: str | None = None) -> bytes:
    """One event; `data` is written as JSON on one line."""
    lead = f"event: {name}\n" if name else ""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"{lead}data: {text}\n\n".encode()


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives; it is cancelled where the client leaves.

    Raises:
        ClientGoneError: it did.
    """
    try:
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(_raise_when_gone(receive))
            result = await work
            watch.cancel()
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return result


class EventStream:
    """A response whose events are made by a generator, from whatever moment.

    Between generator and client is a buffer of bounded size: a client for which more is waiting,
    or which takes nothing for `timeout_s`, is dropped, and the generator closed.

    Args:
        first: events that were made already.
        events: the others. An error of theirs becomes the last event.
        buffer_bytes: most that waits for the client.
        timeout_s: longest that a write may wait.
    """

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        *,
        buffer_bytes: int,
        timeout_s: float,
    ) -> None:
        self._events, self._timeout_s = events, timeout_s
        self._buffer = _Buffer(buffer_bytes)
        self._buffer.put(first)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(_raise_when_gone(receive))
                group.create_task(self._make())
                await self._send(send)
                watch.cancel()
        except* ClientGoneError:
            pass
        except* (ClientTooSlowError, TimeoutError):
            logger.info("dropped a client that does not read")
            if abort := scope.get("state", {}).get("abort"):
                abort()
        finally:
            await self._events.aclose()

    async def _make(self) -> None:
        try:
            async with aclosing(self._events):
                async for data in self._events:
                    self._buffer.put(data)
        except ClientTooSlowError:
            raise
        except Exception as error:
            self._buffer.put(event(as_problem(error).body(), "error"))
        self._buffer.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        while data := await self._buffer.take():
            async with asyncio.timeout(self._timeout_s):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        async with asyncio.timeout(self._timeout_s):
            await send({"type": "http.response.body", "body": b""})


class _Buffer:
    """Bytes on their way from one task to another, up to a size."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._parts: deque[bytes] = deque()
        self._is_closed = False
        self._changed = asyncio.Event()

    def put(self, data: bytes) -> None:
        """Raises ClientTooSlowError where this would not fit beside what is there."""
        if self._parts and self._num_bytes + len(data) > self._max_bytes:
            raise ClientTooSlowError(f"more than {self._max_bytes} bytes are waiting")
        self._parts.append(data)
        self._num_bytes += len(data)
        self._changed.set()

    def close(self) -> None:
        self._is_closed = True
        self._changed.set()

    async def take(self) -> bytes:
        """All that is there, as soon as something is; b"" at the end."""
        while not self._parts and not self._is_closed:
            self._changed.clear()
            await self._changed.wait()
        data = b"".join(self._parts)
        self._parts.clear()
        self._num_bytes = 0
        return data


async def _raise_when_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGoneError("the client left")
