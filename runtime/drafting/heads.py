"""Guesses from hidden states (Medusa heads): asked where what they are worth is more than the time.

One call gives each of the sequences that it is made for a chain of tokens, with a probability for
each. What it is worth is known afterwards: expected tokens by drafts from the chain, less what the
rows of these drafts cost in tokens, and less the same of what n-grams say. That surplus is learned
by entropy of the last token and by sequence, and decides who is asked the next time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from headrace.runtime.core import Sequence
from headrace.runtime.drafting.acceptance import ENTROPY_EDGES_NATS, AcceptanceTable
from headrace.runtime.drafting.budget import StepCost, draft_lengths
from headrace.runtime.drafting.guess import Guess, Option

TRIAL_STEPS = (
    64  # after so many steps without them they are tried: they may have come to be worth it
)
_PRIOR_SURPLUS = 0.3  # tokens
_PRIOR_WEIGHT = 8.0
_OWN_WEIGHT = 4.0  # of what holds in general against what the sequence itself has shown
_DECAY, _OWN_DECAY = 0.99, 0.9


class HeadGuess(NamedTuple):
    """A token, and its probability according to the head."""

    token_id: int
    probability: float


class Heads(Protocol):
    """Heads on the hidden states of the model that drafts are for (`runtime.draft_heads`)."""

    def knows(self, sequence: Sequence) -> bool:
        """Whether the state that its last token was drawn from is there."""
        ...

    def guess(self, sequences: list[Sequence]) -> tuple[list[list[HeadGuess]], float]:
        """For each what may follow its tokens, one guess a head; nothing where they have failed.
        The time that it took, ms."""
        ...

    def forget(self, seq_id: int) -> None:
        """The sequence has ended."""
        ...


class Surplus:
    """A decaying mean of surplus, in tokens."""

    __slots__ = ("total", "weight")

    def __init__(self, mean: float = 0.0, weight: float = 0.0) -> None:
        self.total, self.weight = mean * weight, weight

    def add(self, value: float, decay: float) -> None:
        self.total, self.weight = self.total * decay + value, self.weight * decay + 1.0


class HeadsAsker:
    """Asks heads for sequences where they have been worth it.

    Attributes:
        heads_ms: time that they took in the last step.
    """

    def __init__(self, heads: Heads, table: AcceptanceTable) -> None:
        self._heads, self._table = heads, table
        self._cost = StepCost()
        self._surplus = [
            Surplus(_PRIOR_SURPLUS, _PRIOR_WEIGHT) for _ in range(len(ENTROPY_EDGES_NATS) + 1)
        ]
        self._own: dict[int, Surplus] = {}
        self._idle_steps = 0
        self.heads_ms = 0.0

    def ask(self, options: list[Option], cost: StepCost, num_sequences: int) -> float:
        """Put guesses of the heads into `options` where they are worth more than what is there.

        Args:
            cost: of a step of the model.
            num_sequences: of the step, those without an option included.

        Returns:
            Time spent, ms.
        """
        self.heads_ms = 0.0
        known = [option for option in options if self._heads.knows(option.sequence)]
        if not known:
            return 0.0
        speed, draft_ms = _speed(options, cost, num_sequences)
        known.sort(key=self._expected, reverse=True)
        count = self._worthwhile(known, speed)
        if not count:
            self._idle_steps += 1
            if self._idle_steps <= TRIAL_STEPS:
                return 0.0
            count = 1
        self._idle_steps = 0
        asked = known[:count]
        chains, self.heads_ms = self._heads.guess([option.sequence for option in asked])
        self._cost.observe(count, self.heads_ms)
        for option, chain in zip(asked, chains, strict=True):
            self._take(option, chain[: option.limit], speed * draft_ms)
        return self.heads_ms

    def forget(self, seq_id: int) -> None:
        """The sequence has ended."""
        self._heads.forget(seq_id)
        self._own.pop(seq_id, None)

    def _expected(self, option: Option) -> float:
        """Surplus expected of asking, tokens."""
        kind, own = self._kind(option), self._own.get(option.sequence.seq_id)
        mean = kind.total / kind.weight
        if own is None:
            return mean
        return (mean * _OWN_WEIGHT + own.total) / (_OWN_WEIGHT + own.weight)

    def _worthwhile(self, known: list[Option], speed: float) -> int:
        """For how many, of the highest surplus first, it pays to ask. `speed`: tokens per ms."""
        best, best_value, value = 0, 0.0, 0.0
        for count, option in enumerate(known, 1):
            value += self._expected(option)
            if value - speed * self._cost(count) > best_value:
                best, best_value = count, value - speed * self._cost(count)
        return best

    def _take(self, option: Option, chain: list[HeadGuess], price: float) -> None:
        """Learn what asking was worth, and take the chain if it is the better guess.

        Args:
            price: of a draft, in tokens.
        """
        if not chain:
            return
        kinds = [self._table.head_kind(i, g.probability) for i, g in enumerate(chain)]
        guess = Guess([g.token_id for g in chain], kinds, option.heads_history)
        before = 0.0 if option.guess is None else _worth(option.guess.chances(), price)
        surplus = max(_worth(guess.chances(), price) - before, 0.0)
        self._kind(option).add(surplus, _DECAY)
        own = self._own.setdefault(option.sequence.seq_id, Surplus())
        own.add(surplus, _OWN_DECAY)
        if surplus > 0.0 or option.guess is None:
            option.guess = guess

    def _kind(self, option: Option) -> Surplus:
        return self._surplus[bisect_right(ENTROPY_EDGES_NATS, option.entropy_nats)]


def _speed(options: list[Option], cost: StepCost, num_sequences: int) -> tuple[float, float]:
    """Tokens per ms of the step without heads, and what a further draft adds to it, ms."""
    chances = [option.guess.chances() for option in options if option.guess is not None]
    lengths = draft_lengths(cost, chances, num_sequences - len(chances))
    num_tokens = num_sequences + sum(lengths)
    pairs = zip(chances, lengths, strict=True)
    expected = num_sequences + sum(sum(own[:length]) for own, length in pairs)
    ms = cost(num_tokens)
    return expected / ms, cost(num_tokens + 1) - ms


def _worth(chances: Iterable[float], price: float) -> float:
    """Tokens that drafts with these chances, falling, bring beyond their price."""
    return sum(max(chance - price, 0.0) for chance in chances)
