"""The driver's side of a worker process."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.environments import PeerError, last_line

_QUIT_S = 5.0
_WINDOWS_ILLEGAL_INSTRUCTION = 0xC000001D


class IllegalInstructionError(PeerError):
    """The worker executed what this CPU does not have or its system does not allow."""


class Client:
    """A worker process and what to say to it.

    Args:
        command: starts the worker.
        log: gets what the worker prints.
        variables: of the environment, beside this process's own.
    """

    def __init__(
        self, command: Sequence[str | Path], log: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                encoding="utf-8",
                env={**os.environ, "PYTHONUTF8": "1", **(variables or {})},
            )
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def request(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Ask and wait.

        Raises:
            IllegalInstructionError: it died of one.
            PeerError: it died otherwise, refused, or said nothing for `timeout_s`.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except OSError:  # it is gone; the end of its output says so below
            pass
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            self.kill()
            raise PeerError(f"no answer to {message['op']!r} in {timeout_s:g} s") from None
        if not line:
            raise self._death()
        answer = json.loads(line)
        assert isinstance(answer, dict)
        if "error" in answer:
            raise PeerError(str(answer["error"]))
        return answer

    def close(self) -> None:
        """Ask it to quit; kill it if it does not."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": "quit"}) + "\n")
            self._process.stdin.close()
            self._process.wait(_QUIT_S)
        except (OSError, subprocess.TimeoutExpired):
            self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _death(self) -> PeerError:
        try:
            code = self._process.wait(_QUIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return PeerError("closed its output and went on")
        if code in (-signal.SIGILL, _WINDOWS_ILLEGAL_INSTRUCTION):
            return IllegalInstructionError("died of an illegal instruction")
        if code < 0:
            return PeerError(f"died of {signal.Signals(-code).name}")
        return PeerError(f"ended with exit code {code}: {last_line(self._log)}")
