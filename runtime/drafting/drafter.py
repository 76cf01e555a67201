"""Drafts for the sequences of a step, and what became of them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from headrace.runtime.core import SampledToken, Sequence
from headrace.runtime.drafting.acceptance import AcceptanceTable, Counts, History
from headrace.runtime.drafting.budget import StepCost, draft_lengths
from headrace.runtime.drafting.ngram import Match, NgramIndex

DEFAULT_DRAFT_TOKENS = 8
_MEAN_DECAY = 0.8  # of the running mean of entropy, a step


def make_drafter(
    max_draft_tokens: int | None,
    batch_entropy_cap_nats: float | None,
    *,
    max_row_tokens: int,
    exact_rows: bool,
) -> Drafter | None:
    """A drafter for a backend, or None. Drafts must not change what is written, so only exact
    backends draft unless told to."""
    if max_draft_tokens is None:
        max_draft_tokens = DEFAULT_DRAFT_TOKENS if exact_rows else 0
    num_drafts = min(max_draft_tokens, max_row_tokens - 1)
    return Drafter(num_drafts, batch_entropy_cap_nats) if num_drafts else None


class _State:
    """What is known of one sequence."""

    __slots__ = ("entropy_nats", "history", "index", "kind", "mean_entropy_nats")

    def __init__(self) -> None:
        self.index, self.history = NgramIndex(), History()
        self.entropy_nats = self.mean_entropy_nats = 0.0
        self.kind: Counts | None = None  # of the draft in flight


class Drafter:
    """Proposes n-gram drafts within a budget that is learned from the steps before.

    Deterministic given what it is told. Belongs to the thread of its scheduler.

    Args:
        max_draft_tokens: most drafts of a sequence in a step.
        batch_entropy_cap_nats: a sequence whose running mean of entropy is above this is in a lane
            of its own and gets none.
    """

    def __init__(self, max_draft_tokens: int, batch_entropy_cap_nats: float | None = None) -> None:
        self.max_draft_tokens = max_draft_tokens
        self._cap_nats = math.inf if batch_entropy_cap_nats is None else batch_entropy_cap_nats
        self._cost = StepCost()
        self._table = AcceptanceTable()
        self._states: dict[int, _State] = {}

    def propose(self, sequences: Iterable[Sequence]) -> dict[int, tuple[int, ...]]:
        """Drafts by `seq_id` for sequences that decode in the next step; none for most.

        No sequence gets more than could be used before `max_new_tokens`. Where it is known what
        must follow (`Sequence.forced`) the draft is that.
        """
        found: list[tuple[Sequence, _State, Match]] = []
        rates: list[float] = []
        limits: list[int] = []
        sure: dict[int, tuple[int, ...]] = {}
        for sequence in sequences:
            state = self._state(sequence)
            state.kind = None
            room = sequence.max_new_tokens - sequence.generated_len - 1
            if sequence.forced and room > 0:  # sure to be accepted: worth it at any cost
                sure[sequence.seq_id] = sequence.forced[: min(room, self.max_draft_tokens)]
                room = 0
            if state.mean_entropy_nats > self._cap_nats:
                room = 0
            match = state.index.longest_match() if room > 0 else None
            if match is None:
                rates.append(0.5)
                limits.append(0)
                continue
            kind = self._table.kind(match.num_tokens, state.entropy_nats)
            found.append((sequence, state, match))
            rates.append(state.history.rate(kind))
            limits.append(min(room, self.max_draft_tokens))
        if not found:
            return sure
        chosen = draft_lengths(self._cost, rates, limits)
        lengths = [length for length, limit in zip(chosen, limits, strict=True) if limit]
        drafts = sure
        for (sequence, state, match), length in zip(found, lengths, strict=True):
            if length:
                state.kind = self._table.kind(match.num_tokens, state.entropy_nats)
                drafts[sequence.seq_id] = state.index.continuation(match, length)
        return drafts

    def index_of(self, sequence: Sequence) -> NgramIndex:
        """Where the n-grams of a sequence were seen, its last token included."""
        return self._state(sequence).index

    def _state(self, sequence: Sequence) -> _State:
        state = self._states.get(sequence.seq_id)
        if state is None:
            state = self._states[sequence.seq_id] = _State()
        state.index.extend(sequence.tokens[len(state.index) :])
        return state

    def observe(self, seq_id: int, num_drafts: int, sampled: tuple[SampledToken, ...]) -> None:
        """Learn what a row came to: one token was sampled more than drafts were accepted."""
        state = self._states.get(seq_id)
        if state is None or not sampled:
            return
        state.entropy_nats = sampled[-1].entropy_nats
        step_nats = sum(token.entropy_nats for token in sampled) / len(sampled)
        state.mean_entropy_nats += (1.0 - _MEAN_DECAY) * (step_nats - state.mean_entropy_nats)
        if num_drafts and state.kind is not None:
            accepted = len(sampled) - 1
            tested = min(accepted + 1, num_drafts)
            state.kind.add(accepted, tested)
            state.history.add(accepted, tested)

    def observe_step(self, num_tokens: int, model_ms: float) -> None:
        """Learn what a step without prompt chunks took."""
        self._cost.observe(num_tokens, model_ms)

    def forget(self, seq_id: int) -> None:
        """The sequence has ended."""
        self._states.pop(seq_id, None)
