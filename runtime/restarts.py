"""How often an engine goes on after the process of its backend has died.

Bad luck ends a process once. What ends it again and again is given up: the engine if no step is
done between, and a request that ran each time and got no token between.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.runtime.core import Sequence

MAX_DEATHS = 3  # in a row, that are survived


class Restarts:
    """Counts the deaths of a backend's process."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._by_sequence: dict[int, tuple[int, int]] = {}  # seq_id: its tokens, deaths since then

    @property
    def is_hopeless(self) -> bool:
        """Whether the process dies whatever is asked of it."""
        return self._in_a_row > MAX_DEATHS

    def step_done(self) -> None:
        self._in_a_row = 0

    def died(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Count a death; which of those that ran are given up."""
        self._in_a_row += 1
        before, self._by_sequence = self._by_sequence, {}
        stuck = []
        for sequence in running:
            num_tokens, deaths = before.get(sequence.seq_id, (0, 0))
            deaths = deaths + 1 if num_tokens == len(sequence.tokens) else 1
            self._by_sequence[sequence.seq_id] = len(sequence.tokens), deaths
            if deaths > MAX_DEATHS:
                stuck.append(sequence)
        return stuck
