"""Drafters that the shipped one is compared with: fixed lengths, no entropy, other's entropy, and
one that knows what will be accepted. Same n-grams, same verification, same engine."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping

from headrace.runtime.core import SampledToken, Sequence
from headrace.runtime.drafting.drafter import Drafter

ENTROPY_EDGES_NATS = (0.05, 0.25, 0.5, 1.2, 2.4)


class CountingDrafter(Drafter):
    """The shipped drafter, with a count of drafts by entropy of the token before them."""

    def __init__(self, max_draft_tokens: int, cap_nats: float | None = None) -> None:
        super().__init__(max_draft_tokens, cap_nats)
        self.drafted: dict[int, int] = defaultdict(int)  # by entropy bin
        self.accepted: dict[int, int] = defaultdict(int)
        self._entropies: dict[int, float] = {}

    def observe(self, seq_id: int, num_drafts: int, sampled: tuple[SampledToken, ...]) -> None:
        if sampled:
            before = self._entropies.get(seq_id, 0.0)
            bin_ = sum(before >= edge for edge in ENTROPY_EDGES_NATS)
            self.drafted[bin_] += num_drafts
            self.accepted[bin_] += min(len(sampled) - 1, num_drafts)
            self._entropies[seq_id] = sampled[-1].entropy_nats
        super().observe(seq_id, num_drafts, self.seen(seq_id, sampled))

    def forget(self, sequence: Sequence) -> None:
        self._entropies.pop(sequence.seq_id, None)
        super().forget(sequence)

    def seen(self, seq_id: int, sampled: tuple[SampledToken, ...]) -> tuple[SampledToken, ...]:
        """What the budget is told of these tokens."""
        return sampled


class NoEntropyDrafter(CountingDrafter):
    """The same budget, blind to entropy."""

    def seen(self, seq_id: int, sampled: tuple[SampledToken, ...]) -> tuple[SampledToken, ...]:
        return tuple(SampledToken(token.token_id, 0.0) for token in sampled)


class ShuffledDrafter(CountingDrafter):
    """A placebo: each sequence is told the entropy of another one, or of an earlier time."""

    def __init__(self, max_draft_tokens: int) -> None:
        super().__init__(max_draft_tokens)
        self._nats: list[float] = []
        self._rng = random.Random(0)

    def seen(self, seq_id: int, sampled: tuple[SampledToken, ...]) -> tuple[SampledToken, ...]:
        if not sampled:
            return sampled
        self._nats = [*self._nats[-255:], sampled[-1].entropy_nats]
        entropy = self._rng.choice(self._nats)
        return (*sampled[:-1], SampledToken(sampled[-1].token_id, entropy))


class FixedDrafter(CountingDrafter):
    """Always as many drafts, wherever there is a match."""

    def propose(self, sequences: Iterable[Sequence]) -> dict[int, tuple[int, ...]]:
        drafts: dict[int, tuple[int, ...]] = {}
        for sequence in sequences:
            index = self.index_of(sequence)
            room = sequence.max_new_tokens - sequence.generated_len - 1
            match = index.longest_match() if room > 0 else None
            if match is not None:
                length = min(room, self.max_draft_tokens)
                drafts[sequence.seq_id] = index.continuation(match, length)
        return drafts


class OracleDrafter(FixedDrafter):
    """Drafts exactly those tokens of a match that will be accepted."""

    def __init__(self, max_draft_tokens: int, answers: Mapping[tuple[int, ...], list[int]]) -> None:
        super().__init__(max_draft_tokens)
        self.answers = answers  # of each prompt, without drafts

    def propose(self, sequences: Iterable[Sequence]) -> dict[int, tuple[int, ...]]:
        ones = list(sequences)
        drafts = super().propose(ones)
        for sequence in ones:
            offered = drafts.pop(sequence.seq_id, ())
            truth = self.answers[tuple(sequence.tokens[: sequence.prompt_len])]
            length = 0
            for guess, right in zip(offered, truth[sequence.generated_len :], strict=False):
                if guess != right:
                    break
                length += 1
            if length:
                drafts[sequence.seq_id] = offered[:length]
        return drafts
