"""Drafts for the sequences of a step, and what became of them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from headrace.runtime.core import SampledToken, Sequence
from headrace.runtime.drafting.acceptance import AcceptanceTable, History
from headrace.runtime.drafting.asking import ModelAsker
from headrace.runtime.drafting.budget import StepCost, draft_lengths
from headrace.runtime.drafting.guess import Guess, Option
from headrace.runtime.drafting.heads import Heads, HeadsAsker
from headrace.runtime.drafting.model import Model
from headrace.runtime.drafting.ngram import NgramIndex
from headrace.runtime.drafting.pool import NgramPool, PoolText

DEFAULT_DRAFT_TOKENS = 8
# Of a prompt that go to the pool with its answer: enough to tell what it answers, where many
# prompts end in the same template.
_POOL_PROMPT_TOKENS = 16
_MEAN_DECAY = 0.8  # of the running mean of entropy, a step


def num_drafts(max_draft_tokens: int | None, *, max_row_tokens: int, exact_rows: bool) -> int:
    """Most drafts of a sequence in a step on some backend. They must not change what is written, so
    only exact backends draft unless told to."""
    if max_draft_tokens is None:
        max_draft_tokens = DEFAULT_DRAFT_TOKENS if exact_rows else 0
    return min(max_draft_tokens, max_row_tokens - 1)


class _State:
    """What is known of one sequence."""

    __slots__ = (
        "entropy_nats",
        "guess",
        "heads_history",
        "history",
        "index",
        "mean_entropy_nats",
        "model_history",
        "pooled",
    )

    def __init__(self) -> None:
        self.index, self.pooled = NgramIndex(), PoolText()
        self.history, self.model_history, self.heads_history = History(), History(), History()
        self.entropy_nats = self.mean_entropy_nats = 0.0
        self.guess: Guess | None = None  # whose beginning is the draft in flight


class Drafter:
    """Proposes drafts within a budget that is learned from the steps before.

    Deterministic given what it is told. Belongs to the thread of its scheduler.

    Args:
        max_draft_tokens: most drafts of a sequence in a step.
        batch_entropy_cap_nats: a sequence whose running mean of entropy is above this is in a lane
            of its own and gets none.
        pool_tokens: of all answers that are kept to draft from; 0 for a sequence's own text alone.
        model: a draft model, beside n-grams.
        heads: on the model's hidden states, likewise.
    """

    def __init__(
        self,
        max_draft_tokens: int,
        batch_entropy_cap_nats: float | None = None,
        pool_tokens: int = 0,
        model: Model | None = None,
        heads: Heads | None = None,
    ) -> None:
        self.max_draft_tokens = max_draft_tokens
        self._cap_nats = math.inf if batch_entropy_cap_nats is None else batch_entropy_cap_nats
        self._cost = StepCost()
        self._table = AcceptanceTable()
        self._pool = NgramPool(pool_tokens) if pool_tokens else None
        self._asker = None if model is None else ModelAsker(model, self._table)
        self._heads = None if heads is None else HeadsAsker(heads, self._table)
        self._states: dict[int, _State] = {}

    @property
    def model_ms(self) -> float:
        """Time that draft model and heads took for the last proposal."""
        model_ms = 0.0 if self._asker is None else self._asker.model_ms
        return model_ms + (0.0 if self._heads is None else self._heads.heads_ms)

    def propose(self, sequences: Iterable[Sequence]) -> dict[int, tuple[int, ...]]:
        """Drafts by `seq_id` for sequences that decode in the next step; none for most.

        No sequence gets more than could be used before `max_new_tokens`. Where it is known what
        must follow (`Sequence.forced`) the draft is that.
        """
        options: list[Option] = []
        drafts: dict[int, tuple[int, ...]] = {}
        num_sequences = 0
        for sequence in sequences:
            num_sequences += 1
            state = self._state(sequence)
            state.guess = None
            room = sequence.max_new_tokens - sequence.generated_len - 1
            limit = min(room, self.max_draft_tokens)
            if room > 0 and sequence.forced:  # sure to be accepted: worth it at any cost
                drafts[sequence.seq_id] = sequence.forced[:limit]
            elif room > 0 and state.mean_entropy_nats <= self._cap_nats:
                guess = self._guess(state, limit, sequence.is_lossy)
                if guess is not None or self._asker is not None or self._heads is not None:
                    histories = state.model_history, state.heads_history
                    options.append(Option(sequence, limit, state.entropy_nats, guess, *histories))
        spent_ms = 0.0
        if self._heads is not None:
            spent_ms = self._heads.ask(options, self._cost, num_sequences)
        if self._asker is not None:
            spent_ms += self._asker.ask(options, self._cost, num_sequences)
        found = [(option.sequence, option.guess) for option in options if option.guess is not None]
        if not found:
            return drafts
        chances = [guess.chances() for _, guess in found]
        lengths = draft_lengths(self._cost, chances, num_sequences - len(found), spent_ms)
        for (sequence, guess), length in zip(found, lengths, strict=True):
            if length:
                self._states[sequence.seq_id].guess = guess
                drafts[sequence.seq_id] = tuple(guess.tokens[:length])
        return drafts

    def index_of(self, sequence: Sequence) -> NgramIndex:
        """Where the n-grams of a sequence were seen, its last token included."""
        return self._state(sequence).index

    def _guess(self, state: _State, limit: int, is_lossy: bool) -> Guess | None:
        """The likelier of what a sequence's own text and those of others say, if any does."""
        tokens, kind = None, None
        own = state.index.longest_match()
        other = None if is_lossy else state.pooled.match
        if own is not None:
            kind = self._table.own_kind(own.num_tokens, state.entropy_nats)
            tokens = state.index.continuation(own, limit)
        if other is not None:
            pool_kind = self._table.pool_kind(other.num_tokens, state.entropy_nats)
            if kind is None or pool_kind.rate > kind.rate:
                tokens, kind = other.continuation(limit), pool_kind
        if tokens is None or kind is None:
            return None
        return Guess(list(tokens), [kind] * len(tokens), state.history)

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
        if num_drafts and state.guess is not None:
            state.guess.learn(num_drafts, len(sampled) - 1)

    def observe_step(self, num_tokens: int, model_ms: float) -> None:
        """Learn what a step without prompt chunks took."""
        self._cost.observe(num_tokens, model_ms)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        state = self._states.pop(sequence.seq_id, None)
        if self._heads is not None:
            self._heads.forget(sequence.seq_id)
        if state is not None:
            self._share(sequence, state)
