"""The page at `/`: files of this package, read once, with headers that let it do nothing else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

# Nothing but our own files runs or is loaded, and no text can become HTML (Trusted Types).
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-cache",
}
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
INDEX = "index.html"


def page_routes() -> list[Route]:
    """A route for each file of the page: its paths are known beforehand."""
    folder = files("headrace.runtime.server") / "page"
    found = {f"/page/{path.name}": path.read_bytes() for path in folder.iterdir()}
    found["/"] = found.pop(f"/page/{INDEX}")
    return [Route(path, _file(path, data)) for path, data in sorted(found.items())]


def _file(path: str, data: bytes) -> Callable[[Request], Awaitable[Response]]:
    suffix = "." + path.rpartition(".")[2] if "." in path else ".html"
    headers = {**_HEADERS, "content-type": _TYPES[suffix]}

    async def answer(request: Request) -> Response:
        return Response(data, headers=headers)

    return answer
