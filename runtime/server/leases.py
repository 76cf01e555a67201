"""What a request holds for as long as it lasts, streams included."""

from __future__ import annotations

from contextlib import ExitStack

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

_KEY = "headrace.held"


class Holding:
    """Lets go of what a request holds when its response has ended, whichever way it does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as held:
            scope[_KEY] = held
            await self._app(scope, receive, send)


def held_by(request: Request) -> ExitStack:
    """What is left when the request ends."""
    held = request.scope[_KEY]
    assert isinstance(held, ExitStack)
    return held
