"""A server that has nothing to do gives back memory once, and never amid requests."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable

from starlette.types import Receive, Scope, Send

from headrace.runtime.server.idle import WhenIdle, give_back

AFTER_S = 0.05
Ask = Callable[[str, asyncio.Event], Awaitable[None]]


def run(talk: Callable[[Ask, list[int]], Awaitable[None]]) -> list[int]:
    """What was called while a conversation with a `WhenIdle` lasted and for a while after it."""
    called: list[int] = []

    async def main() -> None:
        waits: dict[int, asyncio.Event] = {}

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await waits[id(scope)].wait()

        idle = WhenIdle(app, lambda: called.append(1), AFTER_S)

        async def ask(method: str, end: asyncio.Event) -> None:
            scope: Scope = {"type": "http", "method": method, "path": "/"}
            waits[id(scope)] = end
            await idle(scope, _receive, _send)

        await talk(ask, called)
        await asyncio.sleep(4 * AFTER_S)

    asyncio.run(main())
    return called


async def _receive() -> dict[str, object]:
    return {}


async def _send(_: object) -> None:
    pass


def ended() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


def test_once_after_requests() -> None:
    async def talk(ask: Ask, called: list[int]) -> None:
        for _ in range(3):
            await ask("POST", ended())
        await asyncio.sleep(4 * AFTER_S)
        assert called == [1]
        await ask("POST", ended())

    assert run(talk) == [1, 1]


def test_not_while_one_lasts() -> None:
    async def talk(ask: Ask, called: list[int]) -> None:
        end = asyncio.Event()
        long = asyncio.create_task(ask("POST", end))
        await asyncio.sleep(0)
        await ask("POST", ended())
        await asyncio.sleep(4 * AFTER_S)
        assert called == []
        end.set()
        await long

    assert run(talk) == [1]


def test_a_cancelled_request_is_over() -> None:
    async def talk(ask: Ask, called: list[int]) -> None:
        left = asyncio.create_task(ask("POST", asyncio.Event()))
        await asyncio.sleep(0)
        left.cancel()

    assert run(talk) == [1]


def test_those_who_only_look_do_not_count() -> None:
    async def talk(ask: Ask, called: list[int]) -> None:
        await ask("GET", ended())

    assert run(talk) == []


class Loop:
    """Refers to itself, as the traceback of an error does."""

    def __init__(self) -> None:
        self.itself = self


def test_what_refers_to_itself_is_given_back() -> None:
    gc.disable()  # else it might be collected anyway
    try:
        found = weakref.ref(Loop())
        assert found() is not None
        give_back()
        assert found() is None
    finally:
        gc.enable()
