"""What may follow a sequence, whoever says so, and how likely it is to be right."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

from headrace.runtime.core import Sequence
from headrace.runtime.drafting.acceptance import Counts, History


@dataclass(slots=True)
class Guess:
    """Tokens that may follow.

    Attributes:
        tokens: one after another.
        kinds: of each, the kind of situation that it was guessed in.
        history: what the sequence has shown with guesses from this source.
        asked: the kind that was thought of before the source was asked, where that cost something.
    """

    tokens: list[int]
    kinds: list[Counts]
    history: History
    asked: Counts | None = None

    def chances(self) -> list[float]:
        """That a token and all before it are accepted, for each; falling."""
        chance, rate, found, known = 1.0, 1.0, list[float](), None
        for kind in self.kinds:
            if kind is not known:
                rate, known = self.history.rate(kind), kind
            chance *= rate
            found.append(chance)
        return found

    def learn(self, num_drafts: int, accepted: int) -> None:
        """The first `num_drafts` tokens were drafts, and `accepted` of them were right."""
        tested = min(accepted + 1, num_drafts)
        left = accepted
        for kind, same in groupby(self.kinds[:tested]):
            count = len(list(same))
            kind.add(min(left, count), count)
            left -= min(left, count)
        self.history.add(accepted, tested)
        if self.asked is not None:
            self.asked.add(accepted, tested)


@dataclass(slots=True)
class Option:
    """A sequence of the next step that may get drafts.

    Attributes:
        limit: most drafts that it can use, at least 1.
        entropy_nats: of its last token.
        guess: what its n-grams say.
        model_history: what it has shown with guesses of a draft model.
        heads_history: with those of heads.
    """

    sequence: Sequence
    limit: int
    entropy_nats: float
    guess: Guess | None
    model_history: History = field(default_factory=History)
    heads_history: History = field(default_factory=History)
