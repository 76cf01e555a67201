"""Guessing from repetition: what followed when the last tokens were seen before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

NGRAM_SIZES = (3, 2)  # longest first; a single token says too little
MAX_CANDIDATES = 16  # earlier places that are looked at, the latest first
MAX_MATCH_TOKENS = 32


class Match(NamedTuple):
    """An earlier place that ends like the text does now.

    Attributes:
        end: position behind the match, whose token is the first guess.
        num_tokens: how many tokens before `end` are the last ones of the text, at most
            `MAX_MATCH_TOKENS`.
    """

    end: int
    num_tokens: int


class NgramIndex:
    """Where the n-grams of one growing text were seen: chains of earlier places, as in LZ77.

    About 300 bytes a token; appending and looking up do not depend on the length of the text.
    (Prompt lookup decoding: Saxena, 2023.)
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._latest: tuple[dict[int, int], ...] = tuple({} for _ in NGRAM_SIZES)
        # Per position: the last earlier position at which the same n-gram ended, or -1.
        self._earlier: tuple[list[int], ...] = tuple([] for _ in NGRAM_SIZES)

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Iterable[int]) -> None:
        tokens = self._tokens
        (latest_of_3, latest_of_2), (earlier_of_3, earlier_of_2) = self._latest, self._earlier
        for token in token_ids:
            here = len(tokens)
            tokens.append(token)
            of_2 = of_3 = -1
            if here >= 1:
                key = tokens[here - 1] << 32 | token
                of_2 = latest_of_2.get(key, -1)
                latest_of_2[key] = here
                if here >= 2:
                    key |= tokens[here - 2] << 64
                    of_3 = latest_of_3.get(key, -1)
                    latest_of_3[key] = here
            earlier_of_2.append(of_2)
            earlier_of_3.append(of_3)

    def longest_match(self) -> Match | None:
        """The longest match among the candidates of the largest n-gram that has any; of equally
        long ones the latest."""
        tokens = self._tokens
        last = len(tokens) - 1
        for size, earlier in zip(NGRAM_SIZES, self._earlier, strict=True):
            best: Match | None = None
            place = earlier[last] if tokens else -1
            for _ in range(MAX_CANDIDATES):
                if place < 0:
                    break
                length = size
                limit = min(place + 1, MAX_MATCH_TOKENS)
                while length < limit and tokens[place - length] == tokens[last - length]:
                    length += 1
                if best is None or length > best.num_tokens:
                    best = Match(place + 1, length)
                place = earlier[place]
            if best is not None:
                return best
        return None

    def continuation(self, match: Match, num_tokens: int) -> tuple[int, ...]:
        """What followed a match, `num_tokens` of it; what repeats is thought to go on repeating."""
        period = len(self._tokens) - match.end
        tail = self._tokens[match.end : match.end + num_tokens]
        return tuple([tail[i % period] for i in range(num_tokens)])
