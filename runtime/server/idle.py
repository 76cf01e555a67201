"""What a server does once nobody has asked anything for a while."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from functools import partial

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.runtime.machine.memory import trim_heap


class WhenIdle:
    """Calls a function, in a thread, when no request has been under way for some seconds.

    It is called once after each time that there were requests.
    """

    def __init__(self, app: ASGIApp, call: Callable[[], object], after_s: float) -> None:
        self._app, self._call, self._after_s = app, call, after_s
        self._num_requests = 0
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":  # those ask for nothing
            await self._app(scope, receive, send)
            return
        self._num_requests += 1
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_requests -= 1
            if not self._num_requests:
                loop = asyncio.get_running_loop()
                call = partial(loop.run_in_executor, None, self._call)
                self._timer = loop.call_later(self._after_s, call)


def give_back() -> None:
    """Collect what refers to itself, as an error and its traceback do; return what is free."""
    gc.collect()
    trim_heap()
