"""How likely is a draft token to be accepted? Learned while decoding, in plain counts."""

from __future__ import annotations

from bisect import bisect_right

# Kinds of situation: by where the n-gram was seen, by length of the match, and by entropy of the
# token just sampled; of a draft model's guesses by the entropy that they were chosen from, of a
# head's by its probability. Prior rates are corrected by what is seen.
_OWN_EDGES, _OWN_PRIOR_RATES = (3, 4, 6, 10), (0.3, 0.4, 0.55, 0.65, 0.75)
_POOL_EDGES, _POOL_PRIOR_RATES = (6, 10, 16), (0.25, 0.4, 0.55, 0.7)
ENTROPY_EDGES_NATS = (0.05, 0.4, 1.2)
_MODEL_EDGES_NATS = (0.02, 0.1, 0.3, 0.7, 1.5, 3.0)
_MODEL_PRIOR_RATES = (0.97, 0.95, 0.9, 0.75, 0.5, 0.3, 0.15)
_NEXT_PRIOR_RATES = (0.8, 0.7, 0.6, 0.5)
# Of heads by their own probability, which is about right, and by place: behind guesses that were
# right the text is easier than a head had thought.
_HEAD_EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_HEAD_PRIOR_RATES = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95)
_HEAD_PLACES = 4  # later ones are taken for the last of these
_PRIOR_WEIGHT = 4.0
_OWN_WEIGHT = 4.0  # of the kind's rate against what the sequence itself has shown
_KIND_DECAY, _OWN_DECAY = 0.995, 0.9  # of old counts, per draft


class AcceptanceTable:
    """Acceptance rate of drafts by source, match length and entropy, over all sequences."""

    def __init__(self) -> None:
        self._own, self._pool = _kinds(_OWN_PRIOR_RATES), _kinds(_POOL_PRIOR_RATES)
        self._model = [_prior(rate) for rate in _MODEL_PRIOR_RATES]
        self._next = [_prior(rate) for rate in _NEXT_PRIOR_RATES]
        self._heads = [[_prior(r) for r in _HEAD_PRIOR_RATES] for _ in range(_HEAD_PLACES)]

    def own_kind(self, match_tokens: int, entropy_nats: float) -> Counts:
        """Of drafts from a sequence's own text."""
        row = self._own[bisect_right(_OWN_EDGES, match_tokens)]
        return row[bisect_right(ENTROPY_EDGES_NATS, entropy_nats)]

    def pool_kind(self, match_tokens: int, entropy_nats: float) -> Counts:
        """Of drafts from the text of another."""
        row = self._pool[bisect_right(_POOL_EDGES, match_tokens)]
        return row[bisect_right(ENTROPY_EDGES_NATS, entropy_nats)]

    def model_kind(self, guess_entropy_nats: float) -> Counts:
        """Of a draft model's guess."""
        return self._model[bisect_right(_MODEL_EDGES_NATS, guess_entropy_nats)]

    def head_kind(self, place: int, probability: float) -> Counts:
        """Of the guess of head `place`, if those before it are right."""
        row = self._heads[min(place, _HEAD_PLACES - 1)]
        return row[bisect_right(_HEAD_EDGES, probability)]

    def next_kind(self, entropy_nats: float) -> Counts:
        """Of whatever a draft model will guess next, before it is asked."""
        return self._next[bisect_right(ENTROPY_EDGES_NATS, entropy_nats)]


class Counts:
    """Draft tokens that were accepted, of those that were tested: the ones up to and including the
    first that was rejected. Old ones fade."""

    __slots__ = ("accepted", "tested")

    def __init__(self, accepted: float = 0.0, tested: float = 0.0) -> None:
        self.accepted, self.tested = accepted, tested

    def add(self, accepted: int, tested: int, decay: float = _KIND_DECAY) -> None:
        self.accepted = self.accepted * decay + accepted
        self.tested = self.tested * decay + tested

    @property
    def rate(self) -> float:
        return self.accepted / self.tested


class History:
    """What one sequence has shown."""

    __slots__ = ("_own",)

    def __init__(self) -> None:
        self._own = Counts()

    def rate(self, kind: Counts) -> float:
        """Acceptance rate expected of this sequence in a situation of this kind, in (0, 1)."""
        own = self._own
        rate = (kind.rate * _OWN_WEIGHT + own.accepted) / (_OWN_WEIGHT + own.tested)
        return min(max(rate, 0.01), 0.99)

    def add(self, accepted: int, tested: int) -> None:
        self._own.add(accepted, tested, _OWN_DECAY)


def _kinds(prior_rates: tuple[float, ...]) -> list[list[Counts]]:
    """Counts by match and entropy, as if a few drafts had been seen of each."""
    return [[_prior(rate) for _ in range(len(ENTROPY_EDGES_NATS) + 1)] for rate in prior_rates]


def _prior(rate: float) -> Counts:
    return Counts(rate * _PRIOR_WEIGHT, _PRIOR_WEIGHT)
