"""A line on the terminal that says how far something is; nothing where no terminal is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_INTERVAL_S = 0.1
_BAR_WIDTH = 24


@contextmanager
def progress_line(title: str, amount: Callable[[int], str] = str) -> Iterator[_Line]:
    """Shows what it is called with: how much is done, and of how much.

    Args:
        amount: a number in words.
    """
    line = _Line(title, amount)
    try:
        yield line
    finally:
        line.close()


class _Line:
    """The line; called with what is done and the total, as often as one likes."""

    def __init__(self, title: str, amount: Callable[[int], str]) -> None:
        self._title, self._amount = title, amount
        self._begun: tuple[float, int] | None = None
        self._shown_at = 0.0
        self._is_shown = False

    def __call__(self, done: int, total: int, note: str = "") -> None:
        now = time.monotonic()
        if self._begun is None:
            self._begun = now, done
        if not sys.stderr.isatty() or (now - self._shown_at < _INTERVAL_S and done < total):
            return
        self._shown_at, self._is_shown = now, True
        rest = remaining_s(now - self._begun[0], done - self._begun[1], total - done)
        text = render(self._title, done, total, self._amount, rest)
        print(f"\r\033[K{text}{note and '  ' + note}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the line, so that what follows has one of its own."""
        if self._is_shown:
            print(file=sys.stderr, flush=True)
            self._is_shown = False


def remaining_s(elapsed_s: float, done: int, left: int) -> float | None:
    """Seconds that the rest takes at the pace so far; None where nothing is known."""
    return elapsed_s / done * left if done > 0 and left > 0 else None


def render(
    title: str, done: int, total: int, amount: Callable[[int], str], left_s: float | None
) -> str:
    """The line as text."""
    share = done / total if total else 1.0
    filled = int(share * _BAR_WIDTH)
    bar = "#" * filled + "-" * (_BAR_WIDTH - filled)
    left = "" if left_s is None else f", {duration(left_s)} left"
    return f"{title} [{bar}] {share:4.0%}  {amount(done)} of {amount(total)}{left}"


def duration(seconds: float) -> str:
    """Such as "8 s", "3:05" and "2:00:00"."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def megabytes(count: int) -> str:
    """Bytes as megabytes or gigabytes."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
