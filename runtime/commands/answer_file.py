"""A file of JSON lines and the file of answers to it, which loses none whatever happens.

Answers come in any order. Each is written at once to a journal beside the output, with the number
of its line; when all are there, the output is made from it in the order of the input and appears as
a whole. A journal that was left by a run that was ended says what is still to do: it belongs to one
input and one way to answer it, which its first line tells.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from headrace.runtime.errors import ConfigError

MAX_LINE_BYTES = 16 << 20
_NUM_SHOWN = 5


def read_lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Lines that are not blank with their numbers, from 1; None for one that is too long.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) <= MAX_LINE_BYTES:
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    yield number, line
                continue
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE_BYTES)
            yield number, None


class AnswerFile:
    """Answers that are there; made by `answer_file`.

    Attributes:
        num_done: lines that have an answer or failed.
        num_failed: of them.
        failures: the first of those, as number and reason.
    """

    def __init__(self, output: Path, journal: BinaryIO, num_lines: int) -> None:
        self.num_done = self.num_failed = 0
        self.failures: list[tuple[int, str]] = []
        self._output, self._journal = output, journal
        self._offsets = array("q", bytes(8 * (num_lines + 1)))  # in the journal; 0: not there

    def has(self, number: int) -> bool:
        """Whether this line is done."""
        return self._offsets[number] > 0

    def add(self, number: int, record: Mapping[str, Any]) -> None:
        """Keep what came of a line; `record` has "error" where it failed.

        Raises:
            OSError: there is no room. What was added before stays.
        """
        start = self._journal.seek(0, os.SEEK_END)
        rest = memoryview(_json_line({"line": number, **record}))
        while rest:
            rest = rest[self._journal.write(rest) :]
        self._note(number, start, record)

    def take_up(self, identity: Mapping[str, Any]) -> bool:
        """Read what an earlier run left, and cut off what it did not end; whether it is ours.

        A journal that has not even its first line is begun anew.
        """
        self._journal.seek(0)
        head = self._journal.readline()
        if not head.endswith(b"\n"):
            self._journal.truncate(0)
            self._journal.seek(0)
            self._journal.write(_json_line(identity))
            return True
        if head != _json_line(identity):
            return False
        whole = self._journal.tell()
        while (line := self._journal.readline()).endswith(b"\n"):
            try:
                record = json.loads(line)
                self._note(record["line"], whole, record)
            except (ValueError, LookupError, TypeError):  # damaged; what follows is made again
                break
            whole += len(line)
        self._journal.truncate(whole)
        return True

    def finish(self) -> None:
        """Make the output: all lines in their order, and no journal any more."""
        partial = self._output.with_name(f".{self._output.name}.new")
        with partial.open("wb") as file:
            for offset in filter(None, self._offsets):
                self._journal.seek(offset)
                file.write(self._journal.readline())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._output)

    def _note(self, number: int, start: int, record: Mapping[str, Any]) -> None:
        self._offsets[number] = start
        self.num_done += 1
        if (error := record.get("error")) is not None:
            self.num_failed += 1
            if len(self.failures) < _NUM_SHOWN:
                self.failures.append((number, str(error)))


@contextmanager
def answer_file(output: Path, num_lines: int, identity: Mapping[str, Any]) -> Iterator[AnswerFile]:
    """The answers that will be `output`, which exists after `finish`.

    Args:
        num_lines: of the input, blank ones included.
        identity: plain data that says which input, and how it is answered.

    Raises:
        ConfigError: the output is there already, belongs to another run, or somebody writes it.
        OSError: it cannot be written.
    """
    journal = journal_of(output)
    lock = FileLock(output.with_name(f".{output.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        expected = "a file that no other process is writing"
        raise ConfigError("--output", str(output), expected) from None
    try:
        if output.exists():
            expected = "a file that is not there yet; move it, or choose another"
            raise ConfigError("--output", str(output), expected)
        journal.touch()
        with journal.open("r+b", buffering=0) as file:
            answers = AnswerFile(output, file, num_lines)
            if not answers.take_up(identity):
                raise ConfigError(
                    "--output",
                    str(output),
                    f"the input, the model and the options that {journal.name} was begun with; "
                    "delete that to begin anew",
                )
            yield answers
        if output.exists():
            journal.unlink()
    finally:
        lock.release()
    if output.exists():
        Path(lock.lock_file).unlink(missing_ok=True)


def journal_of(output: Path) -> Path:
    """Where answers are kept until all are there."""
    return output.with_name(f"{output.name}.part")


def _json_line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, sort_keys=False).encode("utf-8", "replace") + b"\n"
