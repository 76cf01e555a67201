"""One file from the network, in as many attempts as it takes.

What has arrived stays in the file; the next attempt asks for the rest, and only if the server
says that it is still the same content. A file that is complete by its length is not yet right:
whoever calls compares its hash.
"""

from __future__ import annotations

import errno
import http.client
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from headrace.runtime.errors import StoreError
from headrace.runtime.store.references import Reference, published_sha256

Progress = Callable[[int, int], None]  # bytes that are there, and of how many

_TIMEOUT_S = 30.0
_CHUNK_BYTES = 1 << 16  # of which part is lost when the process is killed
_MAX_ATTEMPTS = 5  # in a row that brought nothing
_FIRST_WAIT_S = 0.5
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
_HINTS = {
    401: "; set HF_TOKEN if it asks who you are",
    403: "; set HF_TOKEN if it asks who you are",
    404: "; look the address up",
}


@dataclass(slots=True)
class Remote:
    """What is known of the content at the other end; `validator` is an ETag or a date."""

    total_bytes: int | None = None
    validator: str | None = None
    sha256: str | None = None


class _DroppedError(Exception):
    """This attempt ended early; the next may go on."""


def download(
    reference: Reference,
    file: Path,
    remote: Remote,
    *,
    progress: Progress,
    keep: Callable[[Remote], None],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Fetch what is missing of a file.

    Args:
        file: what has arrived before, if anything.
        remote: what was known then; brought up to date.
        keep: called with `remote` whenever that was changed, before content is written.

    Raises:
        StoreError: the server refuses, there is no room, or the attempts are used up. What has
            arrived stays.
    """
    fruitless = 0
    while True:
        before = _size(file)
        try:
            _attempt(reference, file, remote, progress, keep)
            return
        except (_DroppedError, OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreError(f"no space left for {file.name}; free some, then go on") from None
            if reference.url.startswith("file:"):
                raise StoreError(f"{reference.text} cannot be read: {_reason(error)}") from None
            fruitless = 1 if _size(file) > before else fruitless + 1
            if fruitless >= _MAX_ATTEMPTS:
                raise StoreError(
                    f"{reference.text} cannot be fetched: {_reason(error)}; "
                    f"{_size(file)} bytes are there, and the same command goes on"
                ) from None
            sleep(_FIRST_WAIT_S * 2 ** (fruitless - 1))


def _attempt(
    reference: Reference,
    file: Path,
    remote: Remote,
    progress: Progress,
    keep: Callable[[Remote], None],
) -> None:
    start = _size(file)
    if remote.total_bytes is not None and start == remote.total_bytes:
        return
    if remote.validator is None:  # it may be another content by now
        start = 0
    headers = {"User-Agent": "headrace"}
    if start:
        headers |= {"Range": f"bytes={start}-", "If-Range": remote.validator or ""}
    request = urllib.request.Request(reference.url, headers=headers)
    if reference.token is not None:
        request.add_unredirected_header("Authorization", f"Bearer {reference.token}")
    redirects = _Redirects()
    try:
        response = urllib.request.build_opener(redirects).open(request, timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416:  # nothing is left of it, or it is shorter now: begin anew
                file.unlink()
                raise _DroppedError("the content has changed") from None
            if error.code in _TRANSIENT:
                raise _DroppedError(f"the server says {error.code} {error.reason}") from None
            hint = _HINTS.get(error.code, "")
            said = f"{error.code} {error.reason}"
            raise StoreError(f"{reference.text} cannot be fetched: {said}{hint}") from None
    with response:
        if start and not _is_rest(response, start):
            start = 0
        length = response.headers.get("Content-Length")
        if length is None:
            raise StoreError(f"{reference.text} cannot be fetched: the server tells no length")
        remote.total_bytes = start + int(length)
        if start == 0:
            remote.validator = _validator(response.headers)
            remote.sha256 = published_sha256(
                redirects.linked_etag or response.headers.get("X-Linked-ETag")
            )
        keep(remote)
        _require_room(file, int(length))
        _write(response, file, start, remote.total_bytes, progress)


def _write(
    response: IO[bytes], file: Path, start: int, total_bytes: int, progress: Progress
) -> None:
    with file.open("r+b" if start else "wb") as output:
        output.seek(start)
        while chunk := response.read(min(_CHUNK_BYTES, total_bytes - start)):
            output.write(chunk)
            start += len(chunk)
            progress(start, total_bytes)
    if start < total_bytes:
        raise _DroppedError("the connection was closed")


def _is_rest(response: Any, start: int) -> bool:
    """Whether the answer is what was asked for, instead of the whole."""
    wanted = f"bytes {start}-"
    part: str = response.headers.get("Content-Range", "")
    return response.status == 206 and part.startswith(wanted)


def _validator(headers: Mapping[str, str] | Message) -> str | None:
    """What says that the content is still the same."""
    etag = headers.get("ETag")
    if etag is not None and not etag.startswith("W/"):
        return etag
    return headers.get("Last-Modified")


def _require_room(file: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(file.parent).free
    if needed_bytes > free_bytes:
        raise StoreError(
            f"{needed_bytes / 1e6:.0f} MB are to be fetched and {free_bytes / 1e6:.0f} MB are free "
            f"in {file.parent.parent}; free some, or let HEADRACE_HOME name another disk"
        )


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error) or type(error).__name__


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows to where nobody on the way can change the content; notes the hash on the way."""

    def __init__(self) -> None:
        self.linked_etag: str | None = None

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        scheme = urlsplit(newurl).scheme
        if scheme != "https" and (scheme != "http" or req.type != "http"):
            raise StoreError(f"{req.host} leads on to {scheme}://, which is not safe to follow")
        self.linked_etag = self.linked_etag or headers.get("X-Linked-ETag")
        return super().redirect_request(req, fp, code, msg, headers, newurl)
