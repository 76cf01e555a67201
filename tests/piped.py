"""A backend at the other end of two pipes, served by a thread: all of an isolated engine but the
process, so that whatever holds here holds there."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from headrace.backends.fake import FakeBackend
from headrace.backends.isolated.backend import IsolatedBackend
from headrace.backends.isolated.serve import serve_backend
from headrace.runtime.child.frames import Channel
from headrace.runtime.config import EngineConfig
from headrace.runtime.errors import EngineProcessError


def piped(backend: FakeBackend) -> IsolatedBackend:
    """`backend` as an engine sees it through pipes."""
    return IsolatedBackend("fake", Path(), EngineConfig(), lambda: ThreadChild(backend))


class ThreadChild(Channel):
    """A thread in the place of a process."""

    def __init__(self, backend: FakeBackend) -> None:
        (down_out, down_in), (up_out, up_in) = os.pipe(), os.pipe()
        super().__init__(_file(up_out, "rb"), _file(down_in, "wb"))
        backend.closed = False
        link = Channel(_file(down_out, "rb"), _file(up_in, "wb"))
        self._thread = threading.Thread(target=_serve, args=(link, backend), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._outgoing.close()
        self._thread.join()
        super().close()


def _serve(link: Channel, backend: FakeBackend) -> None:
    try:
        serve_backend(link, lambda wanted: backend)
    except EngineProcessError:
        backend.close()
        link.close()


def _file(number: int, mode: str) -> Any:
    return os.fdopen(number, mode, 0)
