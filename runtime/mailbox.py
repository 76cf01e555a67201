"""Calls from the engine thread to an event loop."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio


class LoopClosedError(RuntimeError):
    """The event loop was closed: nobody is left there to hear."""


class Mailbox:
    """Wakes a loop once for all that is posted until it looks.

    A step has news for many requests of one loop, and waking it costs a system call. One thread
    posts. The loop is not kept alive.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._calls: deque[Callable[[], None]] = deque()
        self._is_due = False  # the loop was woken and has not looked yet

    def post(self, call: Callable[[], None]) -> None:
        """Have the loop make this call, in order.

        Raises:
            LoopClosedError: by now, or since a call that it never came to.
        """
        loop = self._loop()
        if loop is None or loop.is_closed():
            raise LoopClosedError("the event loop was closed")
        self._calls.append(call)
        if self._is_due:
            return
        self._is_due = True
        try:
            loop.call_soon_threadsafe(self._deliver)
        except RuntimeError as error:  # closed since the look above
            raise LoopClosedError("the event loop was closed") from error

    def _deliver(self) -> None:
        self._is_due = False  # before the last look, so that nothing posted meanwhile is forgotten
        while self._calls:
            self._calls.popleft()()
