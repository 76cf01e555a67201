"""Who is let in: hosts, pages, keys, and how many at once."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.runtime.server.metrics import Metrics
from headrace.runtime.server.options import ServerOptions
from headrace.runtime.server.problems import ApiError


class Guard:
    """Refuses what must not get further, and counts the rest.

    A page of another site can make a browser send requests to this machine. Its own name for it
    (DNS rebinding) shows in `Host`, its address in `Origin`: both must be known.

    Args:
        app: what is guarded.
        paths: known ones, for metrics.
        open_paths: those that need no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        options: ServerOptions,
        metrics: Metrics,
        paths: Collection[str],
        open_paths: Collection[str],
    ) -> None:
        self._app, self._options, self._metrics = app, options, metrics
        self._paths, self._open_paths = frozenset(paths), frozenset(open_paths)
        self._key = None if options.api_key is None else options.api_key.encode()
        self._hosts = {"localhost", *(host.lower() for host in options.allowed_hosts)}
        self._num_working = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        counted = self._counted(scope, send)
        try:
            self._check(scope)
        except ApiError as error:
            await error.response()(scope, receive, counted)
            return
        if scope["method"] != "POST":  # nothing else takes time
            await self._app(scope, receive, counted)
            return
        self._num_working += 1
        self._metrics.in_progress.set(self._num_working)
        try:
            await self._app(scope, receive, counted)
        finally:
            self._num_working -= 1
            self._metrics.in_progress.set(self._num_working)

    def _check(self, scope: Scope) -> None:
        """Raises ApiError: 400, 401, 403 or 429."""
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        name = _host_name(hosts[0]) if len(hosts) == 1 else None
        if name is None:
            raise ApiError(400, "the request needs one Host header")
        if not self._is_known(name):
            message = f"host {name[:100]!r} is not served; start with --allowed-host to add one"
            raise ApiError(403, message, code="host_not_allowed")
        origin = headers.get("origin")
        if origin is not None and not self._is_own(origin, hosts[0]):
            message = f"pages of {origin[:100]!r} may not ask; start with --cors-origin to let them"
            raise ApiError(403, message, code="origin_not_allowed")
        if self._key is not None and scope["path"] not in self._open_paths:
            self._check_key(headers)
        if scope["method"] == "POST" and self._num_working >= self._options.max_requests:
            message = f"{self._num_working} requests are being worked on; try again later"
            raise ApiError(429, message, code="rate_limit_exceeded")

    def _is_known(self, name: str) -> bool:
        """An address is no name that somebody else could have made point here."""
        if name in self._hosts or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _is_own(self, origin: str, host: str) -> bool:
        return origin in self._options.cors_origins or origin in (
            f"http://{host}",
            f"https://{host}",
        )

    def _check_key(self, headers: Headers) -> None:
        assert self._key is not None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(given.strip().encode("latin-1", "replace"), self._key)
        if scheme.lower() != "bearer" or not is_right:
            message = "the API key is missing or wrong; send `Authorization: Bearer KEY`"
            raise ApiError(
                401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
            )

    def _counted(self, scope: Scope, send: Send) -> Send:
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        return counting


def _host_name(host: str) -> str | None:
    """The name in a Host header, in lower case and without its port; None where it is malformed."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port  # raises for what is no number
    except ValueError:
        return None
    is_bare = not (parts.path or parts.query or parts.fragment or "@" in host)
    return parts.hostname if is_bare and parts.hostname else None
