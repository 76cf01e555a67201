"""Medusa heads at work: the hidden states that they guess from, kept by sequence."""

from __future__ import annotations

import logging
from collections.abc import Sequence as List
from typing import Any, NamedTuple, Protocol

from headrace.backends.base import StepOutput
from headrace.runtime.core import Sequence
from headrace.runtime.drafting.heads import HeadGuess
from headrace.runtime.errors import HeadraceError

logger = logging.getLogger(__name__)


class HeadsRunner(Protocol):
    """A device that computes heads (`backends.heads.CpuHeads`)."""

    def run(self, states: List[Any]) -> tuple[list[list[tuple[int, float]]], float]:
        """Tokens and probabilities, one pair a head, for each state float32 [hidden]; and ms.

        Raises:
            BackendError: the device failed.
        """
        ...

    def close(self) -> None: ...


class DraftHeads:
    """See `drafting.heads.Heads`. If the heads fail they have no guesses any more, and that is all.

    A state belongs to a text, so it stays good while its sequence is interrupted.
    """

    def __init__(self, runner: HeadsRunner) -> None:
        self._runner = runner
        self._kept: dict[int, _Kept] = {}
        self._has_failed = False

    def keep(self, sequence: Sequence, num_sampled: int, output: StepOutput, line: int) -> None:
        """A sequence is about to get `num_sampled` more tokens, at least one; its lines of the
        output begin at `line`."""
        if output.hidden is not None and not self._has_failed:
            state = output.hidden[line + num_sampled - 1].copy()
            self._kept[sequence.seq_id] = _Kept(len(sequence.tokens) + num_sampled, state)

    def knows(self, sequence: Sequence) -> bool:
        """See `drafting.heads.Heads`."""
        kept = self._kept.get(sequence.seq_id)
        return kept is not None and kept.num_tokens == len(sequence.tokens)

    def guess(self, sequences: list[Sequence]) -> tuple[list[list[HeadGuess]], float]:
        """See `drafting.heads.Heads`."""
        try:
            found, ms = self._runner.run([self._kept[s.seq_id].state for s in sequences])
        except HeadraceError as error:
            logger.warning("the draft heads failed and are not asked any more: %s", error)
            self._has_failed = True
            self._kept.clear()
            return [[] for _ in sequences], 0.0
        return [[HeadGuess(*pair) for pair in chain] for chain in found], ms

    def forget(self, seq_id: int) -> None:
        """See `drafting.heads.Heads`."""
        self._kept.pop(seq_id, None)

    def close(self) -> None:
        """Give their memory back."""
        self._runner.close()


class _Kept(NamedTuple):
    num_tokens: int
    state: Any
