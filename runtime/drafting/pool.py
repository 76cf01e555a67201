"""Guessing from other answers: what followed when another sequence had the same last tokens.

Drafts are verified, so nothing of another's text can get into an answer; only its pace may show
that a text like it was written before, as with kept prefixes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

NGRAM_SIZE = 4
MAX_CANDIDATES = 4  # places of an n-gram that are looked at, the latest first
MAX_MATCH_TOKENS = 32
PIECE_TOKENS = 256

_OFFSET_BITS = 10  # of a place: number of the piece, then offset in it
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1
_NOWHERE = -1


class PoolMatch(NamedTuple):
    """A place in another text that ends as a text does now.

    Attributes:
        tokens: of the other text; it may grow.
        end: position behind the match, whose token is the first guess.
        num_tokens: how many tokens before `end` are the last ones of the text, at most
            `MAX_MATCH_TOKENS`.
    """

    tokens: list[int]
    end: int
    num_tokens: int

    def continuation(self, num_tokens: int) -> tuple[int, ...]:
        """What followed, at least one token and at most `num_tokens`."""
        return tuple(self.tokens[self.end : self.end + num_tokens])


class _Piece:
    """Consecutive tokens of a text: the last ones of the piece before, then its own."""

    __slots__ = ("earlier", "first_place", "num_context", "owner", "room", "tokens")

    def __init__(self, owner: object, number: int, context: list[int], room: int) -> None:
        self.owner, self.first_place = owner, number << _OFFSET_BITS
        self.tokens, self.num_context, self.room = context, len(context), room
        # The last place before at which the same n-gram ended, by offset.
        self.earlier = [_NOWHERE] * len(context)


class PoolText:
    """One growing text of a pool.

    Attributes:
        num_tokens: that the pool was given of it.
        match: where another text goes on from the last of them.
    """

    __slots__ = ("mark", "match", "num_tokens", "piece")

    def __init__(self) -> None:
        self.num_tokens, self.mark = 0, object()  # the mark is on all of its pieces
        self.match: PoolMatch | None = None
        self.piece = _Piece(self.mark, 0, [], 0)


class NgramPool:
    """The newest pieces of many texts, and where their n-grams were seen.

    Takes about 150 bytes a token; appending and looking up do not depend on how much there is.

    Args:
        capacity_tokens: the oldest pieces go when there are more.
        piece_tokens: after which a text begins a new piece, at most 512.
    """

    def __init__(self, capacity_tokens: int, piece_tokens: int = PIECE_TOKENS) -> None:
        assert piece_tokens + MAX_MATCH_TOKENS <= _OFFSET_MASK
        self._capacity, self._piece_tokens = capacity_tokens, piece_tokens
        self._pieces: dict[int, _Piece] = {}  # by number, oldest first
        self._num_pieces = 0  # ever begun
        self._num_tokens = 0
        self._latest: dict[int, int] = {}  # place where an n-gram was last seen

    def __len__(self) -> int:
        """Tokens held."""
        return self._num_tokens

    def extend(self, text: PoolText, token_ids: Iterable[int]) -> None:
        """Append tokens to a text and look for where it may go on from the last of them."""
        piece, latest, place, count = text.piece, self._latest, _NOWHERE, 0
        for token in token_ids:
            if not piece.room:
                piece = self._begin_piece(text)
            tokens = piece.tokens
            tokens.append(token)
            place = _NOWHERE
            if len(tokens) >= NGRAM_SIZE:
                key = _key(tokens[-4], tokens[-3], tokens[-2], token)
                place = latest.get(key, _NOWHERE)
                latest[key] = piece.first_place + len(tokens) - 1
            piece.earlier.append(place)
            piece.room -= 1
            count += 1
        if count:
            text.num_tokens += count
            self._num_tokens += count
            text.match = None if place < 0 else self._longest(text, place)
            while self._num_tokens > self._capacity:
                self._forget_oldest()

    def _begin_piece(self, text: PoolText) -> _Piece:
        context, number = text.piece.tokens[-MAX_MATCH_TOKENS:], self._num_pieces
        self._num_pieces += 1
        self._num_tokens += len(context)
        piece = _Piece(text.mark, number, context, self._piece_tokens)
        text.piece = self._pieces[number] = piece
        return piece

    def _forget_oldest(self) -> None:
        number = next(iter(self._pieces))
        piece = self._pieces.pop(number)
        piece.room = 0  # its text begins another if it goes on
        tokens, latest = piece.tokens, self._latest
        self._num_tokens -= len(tokens)
        for offset in range(max(piece.num_context, NGRAM_SIZE - 1), len(tokens)):
            key = _key(*tokens[offset - NGRAM_SIZE + 1 : offset + 1])
            if latest.get(key) == piece.first_place + offset:
                del latest[key]

    def _longest(self, text: PoolText, place: int) -> PoolMatch | None:
        """The longest match in another text among the candidates; of equally long ones the latest.

        Args:
            place: the first candidate.
        """
        best, longest = None, NGRAM_SIZE - 1  # distinct n-grams may share a key
        own = text.piece.tokens
        last = len(own) - 1
        for _ in range(MAX_CANDIDATES):
            piece = self._pieces.get(place >> _OFFSET_BITS)
            if piece is None:
                break
            offset, tokens = place & _OFFSET_MASK, piece.tokens
            if piece.owner is not text.mark and offset + 1 < len(tokens):
                limit, length = min(offset + 1, last + 1, MAX_MATCH_TOKENS), 0
                while length < limit and tokens[offset - length] == own[last - length]:
                    length += 1
                if length > longest:
                    best, longest = PoolMatch(tokens, offset + 1, length), length
                if length == MAX_MATCH_TOKENS:
                    break
            place = piece.earlier[offset]
        return best


def _key(a: int, b: int, c: int, d: int) -> int:
    """Of an n-gram; distinct ones rarely have the same."""
    return a << 45 ^ b << 30 ^ c << 15 ^ d
