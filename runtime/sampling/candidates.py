"""The few tokens of a vocabulary that can be drawn, found without sorting it.

A bound picks candidates that surely include all that is kept, and only those are sorted and
weighed, in float64. `sampling` says what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.lib.introspect import opt_func_info
from numpy.typing import NDArray

from headrace.runtime.config import GenerationConfig
from headrace.runtime.core import TokenAlternative
from headrace.runtime.manifest import PROBABILITY_BLOCK

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]

_BLOCK = PROBABILITY_BLOCK  # tokens a block of the untruncated draw
_COLUMNS = 64  # tokens a block maximum stands for
_TINY = float(np.finfo(np.float32).tiny)
_SORT_KEYS_FROM = 256  # candidates from which building sort keys costs less than it saves


class Scratch:
    """Buffers that all samplers of one thread share.

    Attributes:
        weights: float32 [vocab].
        blocks: float32 [blocks, 128], the same memory; what lies beyond the vocabulary is zero.
        mask: bool [vocab].
        exp: numpy's exp2 where it has a vector kernel here (0.6 of the time of exp, which has one
            on more machines), or exp.
        exponent_unit: `exp(exponent_unit)` is e.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        padded = np.zeros(-(-vocab_size // _BLOCK) * _BLOCK, np.float32)
        self.weights = padded[:vocab_size]
        self.blocks = padded.reshape(-1, _BLOCK)
        self.mask = np.empty(vocab_size, np.bool_)
        kernels = opt_func_info(func_name="^exp2$", signature="float32").get("exp2", {}).values()
        vector = any(not kernel["current"].startswith("baseline") for kernel in kernels)
        self.exp = np.exp2 if vector else np.exp
        self.exponent_unit = 1.0 / math.log(2.0) if vector else 1.0


def draw_candidate(
    logits: Logits,
    ids: Ids,
    rest: float,
    inv_temperature: float,
    config: GenerationConfig,
    u: float,
) -> int:
    """Cut candidates by top_p and min_p, and draw from what is kept.

    Args:
        ids: in the order of the draw; those that other bounds drop are gone.
        rest: weight of the tokens that are no candidates but count for top_p; the first of `ids`
            weighs 1.
        u: in [0, 1).
    """
    weights = logits[ids].astype(np.float64)
    weights -= weights[0]
    weights *= inv_temperature
    np.exp(weights, out=weights)
    cumulative = weights.cumsum()
    kept = ids.size
    if config.top_p < 1.0:
        needed = config.top_p * (float(cumulative[-1]) + rest)
        kept = min(kept, int(cumulative.searchsorted(needed)) + 1)
    if config.min_p > 0.0:
        kept = min(kept, max(1, int((-weights).searchsorted(-config.min_p, side="right"))))
    target = _within(u, float(cumulative[kept - 1]))
    return int(ids[int(cumulative.searchsorted(target, side="right"))])


def _within(u: float, total: float) -> float:
    """u * total, below `total` in spite of rounding: no token of weight zero is drawn."""
    return min(u * total, math.nextafter(total, 0.0))


def nucleus_candidates(
    weights: Logits, total: float, top_p: float, at_least: Callable[[float], Ids]
) -> tuple[Ids, float]:
    """Tokens that include the nucleus, and the weight of the others.

    All tokens at or above some probability are a prefix of the descending order, and once their
    weights come to `top_p` of the total, the nucleus is among them. The last bound needs no such
    check: tokens below (1 - top_p) / V together have less than the 1 - top_p that may be left out.
    """
    for divisor in (512, 16 * 512, 2 * max(weights.size, 16 * 512)):
        ids = at_least(total * (1.0 - top_p) / divisor)
        inside = float(weights[ids].sum(dtype=np.float64))
        if inside >= (top_p + 1e-5 * (1.0 - top_p)) * total:
            break
    return ids, max(0.0, total - inside)


def sole_candidate(weights: Logits, block_maxima: Logits, needed: float) -> int | None:
    """The token that is the whole nucleus, where one surely is: it weighs `needed`, of a total of
    about 1, and no other can weigh as much. Spares confident rows the search for candidates."""
    block = int(block_maxima.argmax())
    if float(block_maxima[block]) < max(needed, 0.5) * (1.0 + 1e-5):  # they are float32
        return None
    return block * _BLOCK + int(weights[block * _BLOCK : (block + 1) * _BLOCK].argmax())


def draw_by_id(weights: Logits, sums: NDArray[np.float32], u: float) -> int:
    """Inverse CDF over the whole vocabulary in order of id: first the block, then the token."""
    ends = sums.cumsum(dtype=np.float64)
    target = _within(u, float(ends[-1]))
    block = int(ends.searchsorted(target, side="right"))
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK].cumsum(dtype=np.float64)
    start = float(ends[block - 1]) if block else 0.0
    share = (target - start) / (float(ends[block]) - start)
    target = _within(share, float(inside[-1]))  # the block's float32 sum differs a little
    return block * _BLOCK + int(inside.searchsorted(target, side="right"))


def weigh(
    logits: Logits, shift: float, inv_temperature: float, scratch: Scratch
) -> NDArray[np.float32]:
    """Put exp((logits - shift) * inv_temperature) into scratch.weights; returns sums by block.

    In float32, with a relative error of up to 2e-6 at exponents of 40.
    """
    # Not zero, which times the minus infinity of a banned token is NaN.
    factor = np.float32(max(inv_temperature * scratch.exponent_unit, _TINY))
    out = scratch.weights
    if shift:
        np.subtract(logits, np.float32(shift), out=out)
        np.multiply(out, factor, out=out)
    else:
        np.multiply(logits, factor, out=out)
    scratch.exp(out, out=out)
    return block_sums(scratch.blocks)


def block_sums(blocks: NDArray[np.float32]) -> NDArray[np.float32]:
    sums: NDArray[np.float32] = np.einsum("ij->i", blocks)  # 4x faster than sum(axis=1)
    return sums


def log_normalizer(logits: Logits, scratch: Scratch) -> float:
    """log(sum(exp(logits))), nats."""
    peak = float(logits.max())
    if not math.isfinite(peak):
        return peak  # `_draw` will say what is wrong
    return peak + math.log(weigh(logits, peak, 1.0, scratch).sum(dtype=np.float64))


def alternatives(logits: Logits, nats: float, count: int) -> tuple[TokenAlternative, ...]:
    if count == 0 or not math.isfinite(nats):
        return ()
    ids = descending(logits, largest(logits, min(count, logits.size)))[:count]
    return tuple(TokenAlternative(int(i), float(logits[i]) - nats) for i in ids)


def largest(logits: Logits, count: int) -> Ids:
    """Ids, ascending, that include the `count` largest and all that tie with the last of them.

    The count-th largest of the maxima of disjoint blocks bounds the count-th largest from below.
    """
    blocks = logits.size // _COLUMNS
    values = logits
    if 0 < count <= blocks:
        values = logits[: blocks * _COLUMNS].reshape(_COLUMNS, blocks).max(axis=0)
    bound = np.partition(values, values.size - count)[values.size - count]
    ids: Ids = (logits >= bound).nonzero()[0]
    return ids


def at_least(values: Logits, bound: float, scratch: Scratch) -> Ids:
    return np.greater_equal(values, np.float32(bound), out=scratch.mask).nonzero()[0]


def at_least_in_blocks(values: Logits, block_maxima: Logits, bound: float) -> Ids:
    """`at_least`, reading only the blocks that have such a value."""
    limit = np.float32(bound)
    blocks = (block_maxima >= limit).nonzero()[0]
    inside = (values.reshape(-1, _BLOCK).take(blocks, axis=0) >= limit).ravel().nonzero()[0]
    ids: Ids = blocks[inside // _BLOCK] * _BLOCK + inside % _BLOCK
    return ids


def descending(logits: Logits, ids: Ids) -> Ids:
    """Ids (ascending) in order of descending logit, ties by ascending id.

    Many are sorted by 64-bit keys, with the float's order in the high half and the id in the low
    one: an order of magnitude faster than a stable sort.
    """
    values = logits[ids]
    if ids.size < _SORT_KEYS_FROM:
        return ids[(-values).argsort(kind="stable")]
    bits = (values + np.float32(0.0)).view(np.int32)  # + 0 makes -0.0 tie with 0.0
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats count down
    keys: Ids = (np.invert(ascending).astype(np.int64) << 32) | ids
    keys.sort()
    return keys & 0xFFFFFFFF
