"""Ends processes that have stopped answering."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TICK_S = 1.0
MAX_STILL_TICKS = 60  # between two sums


class StallWatch:
    """Calls `on_stall` when nothing has moved for a while.

    Time is counted in ticks of this process, so that a pause of the whole machine is one tick.

    Args:
        on_stall: called on a thread of its own.
    """

    def __init__(self, on_stall: Callable[[], None]) -> None:
        self._on_stall = on_stall
        self._moves, self._is_waiting = 0, False
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="headrace-ranks", daemon=True).start()

    def moved(self) -> None:
        self._moves += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within, something has to move."""
        self._is_waiting = True
        try:
            yield
        finally:
            self._is_waiting = False

    def close(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        seen, still = -1, 0
        while not self._ended.wait(TICK_S):
            moves = self._moves
            still = still + 1 if self._is_waiting and moves == seen else 0
            seen = moves
            if still >= MAX_STILL_TICKS:
                self._on_stall()
                still = 0
