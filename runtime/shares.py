"""Which part of a decoder each rank of a tensor-parallel group has. Integers only.

Query, key, value, gate and up are split by their outputs, output and down by their inputs, so that
what a rank multiplies in between needs nothing of the others. Heads go by whole KV groups, unevenly
where they do not divide; with more ranks than KV heads each of those is repeated. Embedding and
head are split by tokens. The first ranks have what does not divide.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from headrace.runtime.errors import ConfigError

_INNER_UNIT = 64  # of the MLP's width: blocks and runs of quantized formats stay whole


@dataclass(frozen=True, slots=True)
class Span:
    """[first, first + size)."""

    first: int
    size: int

    @property
    def stop(self) -> int:
        return self.first + self.size

    def times(self, width: int) -> Span:
        """Of elements, where each of these has `width`."""
        return Span(self.first * width, self.size * width)


@dataclass(frozen=True, slots=True)
class RankShare:
    """One rank's part: query heads, KV heads, width of the MLP, tokens of the vocabulary."""

    heads: Span
    kv_heads: Span
    inner: Span
    tokens: Span


def split_decoder(
    name: str, *, num_heads: int, num_kv_heads: int, intermediate: int, vocab: int, ranks: int
) -> tuple[RankShare, ...]:
    """The part of each rank.

    Args:
        name: of the model, for messages.

    Raises:
        ConfigError: heads, or anything else, cannot be split between so many.
    """
    repeats = ranks % num_kv_heads == 0 and num_heads % ranks == 0
    if ranks > num_kv_heads and not repeats:
        raise ConfigError(
            "devices",
            ranks,
            f"a number that splits the {num_kv_heads} KV heads of {name}, or a "
            f"multiple of it that divides its {num_heads} heads",
        )
    if ranks > min(intermediate, vocab):
        raise ConfigError("devices", ranks, f"no more than the MLP of {name} is wide")
    if ranks > num_kv_heads:
        kv_heads = [Span(rank * num_kv_heads // ranks, 1) for rank in range(ranks)]
        heads = split_evenly(num_heads, ranks)
    else:
        kv_heads = split_evenly(num_kv_heads, ranks)
        heads = [span.times(num_heads // num_kv_heads) for span in kv_heads]
    inner = split_evenly(intermediate, ranks, _inner_unit(intermediate, ranks))
    tokens = split_evenly(vocab, ranks)
    return tuple(RankShare(*spans) for spans in zip(heads, kv_heads, inner, tokens, strict=True))


def split_evenly(total: int, ranks: int, unit: int = 1) -> list[Span]:
    """Spans of whole units, as even as it gets; the first ones have one more."""
    assert total % unit == 0
    base, more = divmod(total // unit, ranks)
    firsts = [rank * base + min(rank, more) for rank in range(ranks + 1)]
    return [Span(first, stop - first).times(unit) for first, stop in pairwise(firsts)]


def _inner_unit(intermediate: int, ranks: int) -> int:
    """The largest power of two up to `_INNER_UNIT` that leaves something to every rank."""
    unit = _INNER_UNIT
    while intermediate % unit or intermediate // unit < ranks:
        unit //= 2
    return unit
