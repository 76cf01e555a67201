"""A child process, seen from its parent."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from headrace.runtime.child.entry import FLAG, was_asked
from headrace.runtime.child.frames import Channel, Frame
from headrace.runtime.errors import ConfigError, EngineProcessError

logger = logging.getLogger(__name__)

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from headrace.runtime.child.entry import freeze_support; freeze_support()"
)
_LAST_LINES = 5  # of what a child printed, for the message about its end
_MAX_LINE_CHARACTERS = 4096
_GONE_TIMEOUT_S = 1.0
_JOIN_TIMEOUT_S = 5.0


class ChildProcess:
    """A running child. One thread sends at a time, and one receives.

    It is started by a thread of its own, which then reads what the child prints, for the log, and
    waits for its end, whenever that comes: a child may be bound to the thread that has started it
    (`entry`), and one that nobody waits for stays in the table of processes.

    Args:
        kind: of child, see `entry`.

    Raises:
        ConfigError: this program cannot be started again as a child.
        EngineProcessError: the system gives no process.
    """

    def __init__(self, kind: str) -> None:
        self._kind, command = kind, child_command(kind)
        started: Future[subprocess.Popen[bytes]] = Future()
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        name = f"headrace-{kind}-child"
        self._thread = threading.Thread(
            target=self._attend, args=(command, started), name=name, daemon=True
        )
        self._thread.start()
        try:
            self._process = started.result()
        except OSError as error:
            raise EngineProcessError(f"no process can be started: {error}") from None
        assert self._process.stdin is not None and self._process.stdout is not None
        self._channel = Channel(self._process.stdout, self._process.stdin)  # type: ignore[arg-type]

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, header: Mapping[str, Any], *body: bytes | memoryview) -> None:
        """See `Channel.send`; a child that cannot be reached is ended."""
        try:
            self._channel.send(header, *body)
        except EngineProcessError as error:
            raise self._gone(error) from None

    def receive(self, max_body_bytes: int) -> Frame:
        """See `Channel.receive`; a child that cannot be understood is ended."""
        try:
            return self._channel.receive(max_body_bytes)
        except EngineProcessError as error:
            raise self._gone(error) from None

    def kill(self) -> None:
        """End the child without waiting for that. Any thread."""
        self._process.kill()

    def close(self) -> None:
        """End the child at once and wait for that. Calling it again does nothing."""
        self._process.kill()
        self._process.wait()
        self._channel.close()
        self._thread.join(_JOIN_TIMEOUT_S)

    def _gone(self, error: EngineProcessError) -> EngineProcessError:
        """Close, and say how the child ended and what it said last."""
        try:
            status = self._process.wait(_GONE_TIMEOUT_S)  # it comes a moment after its pipes' end
            how = _describe(status)
        except subprocess.TimeoutExpired:
            how = str(error)
        self.close()
        said = " | ".join(self._last_lines)
        return EngineProcessError(f"the {self._kind} process {how}" + (said and f": {said}"))

    def _attend(self, command: list[str], started: Future[subprocess.Popen[bytes]]) -> None:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
        except OSError as error:
            started.set_exception(error)
            return
        started.set_result(process)
        assert process.stderr is not None
        with process.stderr, open(process.stderr.fileno(), errors="replace", closefd=False) as text:
            while line := text.readline(_MAX_LINE_CHARACTERS):
                self._last_lines.append(line.strip())
                logger.warning("%s process %d: %s", self._kind, process.pid, line.rstrip())
        process.wait()


def child_command(kind: str) -> list[str]:
    """The command that starts this program again as a child.

    Raises:
        ConfigError: that cannot be done.
    """
    if getattr(sys, "frozen", False):
        if not was_asked():
            remedy = "headrace.runtime.freeze_support() to be called first in a frozen app's main"
            raise ConfigError("isolated", True, remedy)
        return [sys.executable, FLAG, kind]
    if not is_interpreter():
        raise ConfigError("isolated", True, "False where sys.executable is no Python interpreter")
    return [sys.executable, "-P", "-c", _BOOTSTRAP, json.dumps(sys.path), FLAG, kind]


def is_interpreter() -> bool:
    """Whether `sys.executable` can be started again to run Python code: it may be an app."""
    program = Path(sys.executable or "").stem.lower()
    return not getattr(sys, "frozen", False) and program.startswith(("python", "pypy"))


def _describe(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
