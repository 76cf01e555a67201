"""A file server on the loopback that has all the bad luck one asks for."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Site:
    """What the server has and does; tests change it as they go.

    Attributes:
        files: by path.
        redirects: path to address.
        drop_after: for the next requests one after the other: bytes to send before the connection
            is cut.
        statuses: for the next requests: errors to answer with.
        has_ranges: whether parts are served.
        has_etag: whether contents can be told apart.
        linked: whether redirects tell the SHA-256, as the Hugging Face Hub does.
        has_length: whether the length is told.
        stall_after: bytes to send before waiting for `go_on`.
        seen: path and headers of each request.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    drop_after: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    has_ranges: bool = True
    has_etag: bool = True
    linked: dict[str, str] = field(default_factory=dict)
    has_length: bool = True
    stall_after: int | None = None
    seen: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    address: str = ""
    gate: threading.Event = field(default_factory=threading.Event)

    def go_on(self) -> None:
        self.stall_after = None
        self.gate.set()


@contextmanager
def serving(site: Site) -> Iterator[Site]:
    """The site, at `site.address`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            site.seen.append((self.path, dict(self.headers)))
            if site.statuses:
                self._end(site.statuses.pop(0))
            elif self.path in site.redirects:
                location = {"Location": site.redirects[self.path]}
                linked = site.linked.get(self.path)
                self._end(302, location | ({"X-Linked-ETag": f'"{linked}"'} if linked else {}))
            elif self.path in site.files:
                self._send(site.files[self.path])
            else:
                self._end(404)

        def _send(self, content: bytes) -> None:
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            start = 0
            wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            if wanted and site.has_ranges and self.headers.get("If-Range", etag) == etag:
                start = int(wanted[1])
                if start >= len(content):
                    return self._end(416)
            self.send_response(206 if start else 200)
            if site.has_etag:
                self.send_header("ETag", etag)
            if start:
                self.send_header(
                    "Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}"
                )
            if site.has_length:
                self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            if site.stall_after is not None:
                self.wfile.write(content[: site.stall_after])
                site.gate.wait()
                return None
            cut = site.drop_after.pop(0) if site.drop_after else None
            self.wfile.write(content[start:] if cut is None else content[start : start + cut])
            return None

        def _end(self, status: int, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": "0", **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        site.address = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield site
        finally:
            server.shutdown()
            thread.join()
