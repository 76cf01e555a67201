"""Drafts for the sequences of a step, and what became of them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from headrace.runtime.core import SampledToken, Sequence
from headrace.runtime.drafting.acceptance import AcceptanceTable, Counts, History
from headrace.runtime.drafting.budget import StepCost, draft_lengths
from headrace.runtime.drafting.ngram import NgramIndex
from headrace.runtime.drafting.pool import NgramPool, PoolText

DEFAULT_DRAFT_TOKENS = 8
# Of a prompt that go to the pool with its answer: enough to tell what it answers, where many
# prompts end in the same template.
_POOL_PROMPT_TOKENS = 16
_MEAN_DECAY = 0.8  # of the running mean of entropy, a step


def make_drafter(
    max_draft_tokens: int | None,
    batch_entropy_cap_nats: float | None,
    pool_tokens: int,
    *,
    max_row_tokens: int,
    exact_rows: bool,
) -> Drafter | None:
    """A drafter for a backend, or None. Drafts must not change what is written, so only exact
    backends draft unless told to."""
    if max_draft_tokens is None:
        max_draft_tokens = DEFAULT_DRAFT_TOKENS if exact_rows else 0
    num_drafts = min(max_draft_tokens, max_row_tokens - 1)
    return Drafter(num_drafts, batch_entropy_cap_nats, pool_tokens) if num_drafts else None


class _State:
    """What is known of one sequence."""

    __slots__ = ("entropy_nats", "history", "index", "kind", "mean_entropy_nats", "pooled")

    def __init__(self) -> None:
        self.index, self.history, self.pooled = NgramIndex(), History(), PoolText()
        self.entropy_nats = self.mean_entropy_nats = 0.0
        self.kind: Counts | None = None  # of the draft in flight


class Drafter:
    """Proposes n-gram drafts within a budget that is learned from the steps before.

    Deterministic given what it is told. Belongs to the thread of its scheduler.

    Args:
        max_draft_tokens: most drafts of a sequence in a step.
        batch_entropy_cap_nats: a sequence whose running mean of entropy is above this is in a lane
            of its own and gets none.
        pool_tokens: of all answers that are kept to draft from; 0 for a sequence's own text alone.
    """

    def __init__(
        self,
        max_draft_tokens: int,
        batch_entropy_cap_nats: float | None = None,
        pool_tokens: int = 0,
    ) -> None:
        self.max_draft_tokens = max_draft_tokens
        self._cap_nats = math.inf if batch_entropy_cap_nats is None else batch_entropy_cap_nats
        self._cost = StepCost()
        self._table = AcceptanceTable()
        self._pool = NgramPool(pool_tokens) if pool_tokens else None
        self._states: dict[int, _State] = {}

    def propose(self, sequences: Iterable[Sequence]) -> dict[int, tuple[int, ...]]:
        """Drafts by `seq_id` for sequences that decode in the next step; none for most.

        No sequence gets more than could be used before `max_new_tokens`. Where it is known what
        must follow (`Sequence.forced`) the draft is that.
        """
        found: list[tuple[Sequence, _State, Counts, tuple[int, ...]]] = []
        drafts: dict[int, tuple[int, ...]] = {}
        num_others = 0
        for sequence in sequences:
            state = self._state(sequence)
            state.kind = None
            room = sequence.max_new_tokens - sequence.generated_len - 1
            limit = min(room, self.max_draft_tokens)
            guess = None
            if sequence.forced and room > 0:  # sure to be accepted: worth it at any cost
                drafts[sequence.seq_id] = sequence.forced[:limit]
            elif room > 0 and state.mean_entropy_nats <= self._cap_nats:
                guess = self._guess(state, limit)
            if guess is None:
                num_others += 1
            else:
                found.append((sequence, state, *guess))
        if not found:
            return drafts
        rates = [state.history.rate(kind) for _, state, kind, _ in found]
        limits = [len(tokens) for _, _, _, tokens in found]
        lengths = draft_lengths(self._cost, rates, limits, num_others)
        for (sequence, state, kind, tokens), length in zip(found, lengths, strict=True):
            if length:
                state.kind = kind
                drafts[sequence.seq_id] = tokens[:length]
        return drafts

    def index_of(self, sequence: Sequence) -> NgramIndex:
        """Where the n-grams of a sequence were seen, its last token included."""
        return self._state(sequence).index

    def _guess(self, state: _State, limit: int) -> tuple[Counts, tuple[int, ...]] | None:
        """What may follow, and the kind of guess it is: the likelier of what the own text and
        those of others say."""
        guess: tuple[Counts, tuple[int, ...]] | None = None
        own, other = state.index.longest_match(), state.pooled.match
        if own is not None:
            kind = self._table.own_kind(own.num_tokens, state.entropy_nats)
            guess = kind, state.index.continuation(own, limit)
        if other is not None:
            kind = self._table.pool_kind(other.num_tokens, state.entropy_nats)
            if guess is None or kind.rate > guess[0].rate:
                guess = kind, other.continuation(limit)
        return guess

    def _state(self, sequence: Sequence) -> _State:
        state = self._states.get(sequence.seq_id)
        if state is None:
            state = self._states[sequence.seq_id] = _State()
        state.index.extend(sequence.tokens[len(state.index) :])
        self._share(sequence, state)
        return state

    def _share(self, sequence: Sequence, state: _State) -> None:
        """Give the pool what is new of an answer."""
        if self._pool is not None:
            start = max(sequence.prompt_len - _POOL_PROMPT_TOKENS, 0)
            self._pool.extend(state.pooled, sequence.tokens[start + state.pooled.num_tokens :])

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

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        state = self._states.pop(sequence.seq_id, None)
        if state is not None:
            self._share(sequence, state)
