"""What is typed at `headrace chat`: lines, texts of several lines, and a history of both."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

QUOTES = '"""'
_HISTORY_LENGTH = 1000


def read_text(read_line: Callable[[str], str] = input) -> str | None:
    """The next text; None at the end of the input.

    One that begins with three quotation marks goes on, line by line, to the next three.

    Args:
        read_line: given what to prompt with; raises EOFError at the end.

    Raises:
        KeyboardInterrupt: Ctrl-C; what was typed of the text is dropped.
    """
    prompts = ("> ", ". ") if sys.stdin.isatty() else ("", "")
    try:
        line = read_line(prompts[0])
        if not line.startswith(QUOTES):
            return line
        lines = [line.removeprefix(QUOTES)]
        while not lines[-1].rstrip().endswith(QUOTES):
            lines.append(read_line(prompts[1]))
    except EOFError:
        return None
    lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return "\n".join(lines).strip("\n")


@contextlib.contextmanager
def line_editor(history: Path) -> Iterator[None]:
    """Editing and history for `input`, where Python has them (not on Windows, whose terminal
    does it). The history is kept in a file that its owner alone may read."""
    if not sys.stdin.isatty():
        yield
        return
    try:
        import readline
    except ImportError:
        yield
        return
    with contextlib.suppress(OSError):  # none yet, or one that another editor wrote
        readline.read_history_file(history)
    readline.set_history_length(_HISTORY_LENGTH)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # a history is no reason to complain
            history.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(history, os.O_WRONLY | os.O_CREAT, 0o600))
            readline.write_history_file(history)
