"""Where a child process begins, and how it ends with its parent.

A child is this program started again with `FLAG` as its first argument. A plain interpreter is told
so on the command line; a frozen app, whose executable is the app itself, has to ask first thing:

    if __name__ == "__main__":
        headrace.runtime.freeze_support()
        main()
"""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol

from headrace.runtime.child.frames import Channel, Frame
from headrace.runtime.errors import EngineProcessError

FLAG = "--headrace-child"
# Name of a kind of child -> the module with its `serve(link)`.
_KINDS = {
    "engine": "headrace.backends.isolated.serve",
    "rank": "headrace.backends.tensor_parallel.rank",
}
_PR_SET_PDEATHSIG = 1

_was_asked = False  # whether this program has come by `freeze_support`


class Link(Protocol):
    """What a child has of its parent, and a parent of its child."""

    def send(self, header: Mapping[str, Any], *body: bytes | memoryview) -> None: ...

    def receive(self, max_body_bytes: int) -> Frame: ...


def freeze_support() -> None:
    """Become a child process if this program was started as one; return if it was not.

    Frozen apps (PyInstaller, Nuitka, cx_Freeze) that load a runtime with `isolated=True` call this
    before anything else.
    """
    global _was_asked
    _was_asked = True
    if sys.argv[1:2] == [FLAG]:
        _run(sys.argv[2])


def was_asked() -> bool:
    """Whether this program has come by `freeze_support`, so that it would if started again."""
    return _was_asked


def _run(kind: str) -> None:
    """Serve the parent until it is gone; does not return."""
    status = 1
    try:
        link = _ParentLink(_claim_pipes())
        _end_with_parent()
        import_module(_KINDS[kind]).serve(link)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)  # nothing in here needs to be tidied up


def _claim_pipes() -> Channel:
    """The pipes to the parent, out of reach of everything else that reads or prints here.

    What is printed goes to the parent's log.
    """
    incoming, outgoing = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    # A windowed app has no files for these.
    sys.stdout = sys.stderr = os.fdopen(
        2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
    )
    faulthandler.enable(2)
    return Channel(os.fdopen(incoming, "rb", 0), os.fdopen(outgoing, "wb", 0))


def _end_with_parent() -> None:
    """Have the kernel end this process with the thread that started it, where it can.

    `_ParentLink` notices the end of the parent too, but not while another process that the parent
    has forked holds the pipe open.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is meant for the parent
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class _ParentLink:
    """A channel that is always read, so that the end of the parent is noticed whatever this process
    is doing, and ends it."""

    def __init__(self, channel: Channel) -> None:
        self.send = channel.send
        self._channel = channel
        self._frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="headrace-parent", daemon=True).start()

    def receive(self, max_body_bytes: int) -> Frame:
        return self._frames.get()

    def _listen(self) -> None:
        try:
            while True:
                frame = self._channel.receive(_MAX_BODY_BYTES)
                self._frames.put(Frame(frame.header, memoryview(bytes(frame.body))))
        except EngineProcessError:
            os._exit(0)


_MAX_BODY_BYTES = 1 << 40  # the parent is trusted, and sends what its user has asked for
