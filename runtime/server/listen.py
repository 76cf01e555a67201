"""Sockets, signals and the end: what is around the application while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import HANDLED_SIGNALS

from headrace.runtime.errors import ServeError
from headrace.runtime.server.models import Models
from headrace.runtime.server.options import ServerOptions

logger = logging.getLogger(__name__)

_BACKLOG = 1024
_CONNECTIONS_PER_REQUEST = 2  # some are idle between requests
_AFTER_DRAIN_S = 5.0  # for the last words, once unfinished answers were ended


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that is bound and listens, so that nothing else can take the port.

    Args:
        port: 0 for any that is free.

    Raises:
        ServeError: the address is wrong, taken, or not allowed.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ServeError(f"{host!r} is no address of this machine: {error}") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # on Windows reuse would let others take the port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} of {host} is taken; choose another with --port, or 0 for any"
        elif error.errno == errno.EACCES:
            message = f"port {port} needs rights that this user lacks; choose one above 1023"
        else:
            message = f"cannot listen on port {port} of {host}: {error.strerror or error}"
        raise ServeError(message) from None
    return listener


class Server(uvicorn.Server):
    """Serves until it is told to stop, then lets answers end within a deadline.

    SIGTERM and SIGINT stop it; a second one ends what is under way at once. What is not done by
    the deadline ends with an error that says so.

    Args:
        app: made by `make_app`.
        on_ready: called in the event loop once the models are loaded.

    Attributes:
        interrupted: whether it was SIGINT.
        load_error: why it stopped by itself.
    """

    def __init__(
        self,
        app: ASGIApp,
        models: Models,
        options: ServerOptions,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        timeout_s = options.drain_s + _AFTER_DRAIN_S
        super().__init__(
            uvicorn.Config(
                app,
                http=_protocol(options),
                ws="none",
                loop="asyncio",
                lifespan="on",
                log_config=None,
                log_level="critical",  # it warns of what clients do wrong; we log our own faults
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=int(timeout_s) + 1,
            )
        )
        self._models, self._options, self._on_ready = models, options, on_ready
        self.interrupted = False
        self.load_error: BaseException | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loading = asyncio.create_task(self._load())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.create_task(self._close_at_deadline())
        await super().shutdown(sockets)
        closing.cancel()
        await self._models.close()
        await self._loading

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As the base does, but that the signal does not end the process a second time."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in HANDLED_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.interrupted = self.interrupted or sig == signal.SIGINT
        self.force_exit = self.should_exit
        self.should_exit = True

    async def _load(self) -> None:
        try:
            await self._models.load()
        except Exception as error:
            self.load_error = error
            self.should_exit = True
        else:
            if not self.should_exit:
                self._on_ready()

    async def _close_at_deadline(self) -> None:
        await asyncio.sleep(self._options.drain_s)
        logger.warning("ending %d requests that are not done", len(self.server_state.tasks))
        await self._models.close()


def _protocol(options: ServerOptions) -> type[asyncio.Protocol]:
    """HTTP/1.1 with limits on connections, and on how long a client may say and take nothing."""
    max_connections = _CONNECTIONS_PER_REQUEST * options.max_requests
    timeout_s = options.client_timeout_s

    class Protocol(H11Protocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.app_state = {**self.app_state, "abort": self._abort}
            self._head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                transport.abort()
                return
            taken = transport.get_extra_info("socket")
            if taken is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
                # Whole answers are the system's to deliver: it gives up on who takes nothing.
                taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))
            self._await_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._forget_timer()

        def on_response_complete(self) -> None:
            self._await_head()
            super().on_response_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget_timer()
            super().connection_lost(exc)

        def _await_head(self) -> None:
            """Close unless a request begins in time."""
            self._forget_timer()
            self._head_timer = self.loop.call_later(timeout_s, self._abort)

        def _forget_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _abort(self) -> None:
            if self.transport is not None:
                self.transport.abort()

    return Protocol
