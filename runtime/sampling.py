"""From a row of logits to a token.

The definition, of which `sampling_reference` is the slow twin:

1. *Adjust.* Repetition penalty over prompt and answer (transformers: divide a positive logit,
   multiply a negative one), then presence and frequency penalty over the answer (OpenAI, vLLM:
   `logit - presence - frequency * count`), then `logit_bias`, then, before `min_new_tokens`, the
   ban of stop tokens. Computed in float64, rounded to float32 after the penalties and after the
   bias.
2. *Greedy* at a temperature below 1e-5: the largest logit, ties to the smallest id.
3. *Truncate*, on softmax(logits / temperature), in transformers' order: top_k, then top_p over
   what is left, then min_p. (vLLM applies min_p before them, llama.cpp the temperature after them.)
4. *Draw* by inverse CDF with one uniform number keyed by (seed, position). What is kept stands in
   order of descending logit, ties by ascending id; with no truncation at all, in order of id.

So a sequence's text depends on its own logits and seed only, never on its company, and drafts can
be verified by drawing what would have been drawn without them.

Speed comes from not sorting a vocabulary: a bound picks a few candidates that surely include all
that is kept, and only those are sorted and weighed, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.lib.introspect import opt_func_info
from numpy.typing import NDArray

from headrace.runtime.config import GenerationConfig
from headrace.runtime.core import TokenAlternative
from headrace.runtime.errors import BackendError, RequestError
from headrace.runtime.penalties import Penalties, has_penalty

GREEDY_BELOW = 1e-5  # temperatures under this are greedy (as in vLLM)

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_BLOCK = 256  # tokens a block of the untruncated draw
_COLUMNS = 64  # tokens a block maximum stands for
_SAFE_SUMS = (1e-15, 1e25)  # between these, float32 holds a block's weights with room to spare
_SORT_KEYS_FROM = 256  # candidates from which building sort keys costs less than it saves


def _mix(state: int) -> int:
    """The finalizer of splitmix64: a bijection of 64 bits that avalanches (Steele et al., 2014)."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a function of its arguments alone."""
    return (_mix((_mix(seed & _MASK) + (position + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def sample_seed(seed: int, index: int) -> int:
    """Seed of answer `index` of `n` to one prompt; the first answer has the request's own."""
    return seed if index == 0 else _mix((_mix(seed ^ _GOLDEN) + index * _GOLDEN) & _MASK)


class Scratch:
    """Buffers that all samplers of one thread share.

    Attributes:
        weights: float32 [vocab].
        blocks: float32 [blocks, 256], the same memory; what lies beyond the vocabulary is zero.
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


class Sampler:
    """Draws the tokens of one sequence.

    `sample` changes nothing but the row it is given; `accept` records a token of the answer. To
    verify drafts, sample a row, accept what was drawn, and go on while it equals the draft.

    Attributes:
        inverse_temperature: of the probabilities that `sample` would like to be given; 0 where it
            needs none.

    Args:
        config: of the request.
        prompt: token ids; counted by the repetition penalty only.
        eos_token_ids: the model's.
        seed: of this sequence (`sample_seed`).
        scratch: of the thread that will call `sample`.

    Raises:
        RequestError: `logit_bias` or `stop_token_ids` names a token beyond the vocabulary.
    """

    def __init__(
        self,
        config: GenerationConfig,
        prompt: Sequence[int],
        eos_token_ids: Iterable[int],
        seed: int,
        scratch: Scratch,
    ) -> None:
        self.config, self.seed = config, seed
        self._scratch = scratch
        self._generated_len = 0
        for name, ids in (
            ("logit_bias", config.logit_bias.keys()),
            ("stop_token_ids", config.stop_token_ids),
        ):
            if beyond := [i for i in ids if i >= scratch.vocab_size]:
                raise RequestError(
                    f"{name} names token {beyond[0]}, but the vocabulary has "
                    f"{scratch.vocab_size} tokens"
                )
        eos = frozenset(i for i in eos_token_ids if i < scratch.vocab_size)
        stops = frozenset(config.stop_token_ids)
        self._stop_ids = stops if config.ignore_eos else stops | eos
        self._late_ids = np.array(sorted(stops | eos), np.int64)
        self._bias_ids = np.array(list(config.logit_bias.keys()), np.int64)
        self._bias = np.array(list(config.logit_bias.values()), np.float64)
        self._penalties = Penalties(config, prompt) if has_penalty(config) else None
        self._inv_temperature = (
            1.0 / config.temperature if config.temperature >= GREEDY_BELOW else None
        )
        self._top_k = config.top_k if config.top_k < scratch.vocab_size else 0
        self._weighs_all = self._top_k == 0 and (config.top_p < 1.0 or config.min_p == 0.0)
        plain = self._penalties is None and not self._bias_ids.size and not config.min_new_tokens
        wanted = self._weighs_all and plain and scratch.vocab_size % _BLOCK == 0
        self.inverse_temperature = (self._inv_temperature or 0.0) if wanted else 0.0

    def accept(self, token_id: int) -> None:
        """Append a token to the answer."""
        self._generated_len += 1
        if self._penalties is not None:
            self._penalties.add(token_id)

    def is_stop_token(self, token_id: int, generated_len: int) -> bool:
        """Whether this token ends the answer, of which it is number `generated_len` (from 1).

        Before `min_new_tokens` none does; `sample` does not draw one there either.
        """
        return token_id in self._stop_ids and generated_len >= self.config.min_new_tokens

    def sample(
        self, logits: Logits, position: int, probabilities: Logits | None = None
    ) -> tuple[int, float | None, tuple[TokenAlternative, ...]]:
        """Draw the token at `position` (in the whole sequence, from 0).

        Args:
            logits: float32 [vocab], contiguous; it is written to.
            probabilities: float32 [vocab], softmax(logits * inverse_temperature), or None. They
                save the exponentials of a whole vocabulary.

        Returns:
            Token id; its log probability in nats under softmax of the logits as they came, or
            None where not asked for; the most probable tokens of the same distribution.

        Raises:
            RequestError: the request bans every token.
            BackendError: the logits hold NaN or plus infinity, or are all minus infinity.
        """
        assert logits.shape == (self._scratch.vocab_size,)
        with np.errstate(over="ignore", invalid="ignore"):
            if self.config.logprobs is None:
                return self._draw(logits, position, probabilities), None, ()
            nats = _log_normalizer(logits, self._scratch)
            top = _alternatives(logits, nats, self.config.logprobs)
            raw = logits.copy()
            token = self._draw(logits, position, probabilities)
            return token, float(raw[token]) - nats, top

    def _draw(self, logits: Logits, position: int, probabilities: Logits | None) -> int:
        self._adjust(logits)
        if self._inv_temperature is None:
            return self._best(logits)
        u = uniform(self.seed, position)
        if self._weighs_all:
            if probabilities is not None and self.inverse_temperature:
                return self._draw_from(probabilities, logits, self._inv_temperature, u)
            return self._draw_weighing_all(logits, self._inv_temperature, u)
        config, peak = self.config, float(logits[self._best(logits)])
        if self._top_k:
            ids = _descending(logits, _largest(logits, self._top_k))[: self._top_k]
        else:
            bound = peak + math.log(config.min_p) / self._inv_temperature
            margin = 1e-6 * (abs(peak) + abs(bound))  # the exact test follows, in float64
            ids = _descending(logits, _at_least(logits, bound - margin, self._scratch))
        return _draw_candidate(logits, ids, 0.0, self._inv_temperature, config, u)

    def _draw_weighing_all(self, logits: Logits, inv_temperature: float, u: float) -> int:
        """For top_p alone or no truncation, which need the weight of the whole vocabulary."""
        shift = 0.0  # nearly always good enough, and saves the search for the largest logit
        sums = _weigh(logits, shift, inv_temperature, self._scratch)
        if not _SAFE_SUMS[0] < float(sums.max()) < _SAFE_SUMS[1]:  # NaN is not, either
            shift = float(logits[self._best(logits)])
            sums = _weigh(logits, shift, inv_temperature, self._scratch)
        return self._draw_weighted(self._scratch.weights, sums, logits, inv_temperature, u)

    def _draw_from(
        self, probabilities: Logits, logits: Logits, inv_temperature: float, u: float
    ) -> int:
        """`_draw_weighing_all` with weights that were computed elsewhere."""
        sums = _block_sums(probabilities.reshape(-1, _BLOCK))
        if not 0.5 < float(sums.sum()) < 2.0:  # the logits are damaged: that will say how
            return self._draw_weighing_all(logits, inv_temperature, u)
        return self._draw_weighted(probabilities, sums, logits, inv_temperature, u)

    def _draw_weighted(
        self, weights: Logits, sums: Logits, logits: Logits, inv_temperature: float, u: float
    ) -> int:
        """Draw by weights that are proportional to the probabilities; `sums` are by block."""
        if self.config.top_p == 1.0:
            return _draw_by_id(weights, sums, u)
        ids, rest = _nucleus_candidates(weights, sums, self.config.top_p, self._scratch)
        ids = _descending(logits, ids)
        rest /= float(weights[ids[0]])
        return _draw_candidate(logits, ids, rest, inv_temperature, self.config, u)

    def _best(self, logits: Logits) -> int:
        """The first of the largest logits; raises where it is not a finite number."""
        best = int(logits.argmax())  # the first NaN, if there is one
        if not math.isfinite(logits[best]):
            raise self._no_peak(float(logits[best]))
        return best

    def _adjust(self, logits: Logits) -> None:
        if self._penalties is not None:
            self._penalties.apply(logits)
        if self._bias_ids.size:
            logits[self._bias_ids] = logits[self._bias_ids] + self._bias
        if self._generated_len < self.config.min_new_tokens and self._late_ids.size:
            logits[self._late_ids] -= np.float32(np.inf)  # keeps a NaN one

    def _no_peak(self, peak: float) -> Exception:
        """What is wrong with logits whose largest is not a finite number."""
        if peak != -math.inf:
            kind = "NaN" if math.isnan(peak) else "infinite"
            return BackendError(f"the model produced {kind} logits; the package may be damaged")
        if self._bias_ids.size or self._generated_len < self.config.min_new_tokens:
            return RequestError("logit_bias and min_new_tokens leave no token to draw")
        return BackendError("the model gave every token a probability of zero")


def _draw_candidate(
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


def _nucleus_candidates(
    weights: Logits, sums: NDArray[np.float32], top_p: float, scratch: Scratch
) -> tuple[Ids, float]:
    """Tokens that include the nucleus, and the weight of the others.

    All tokens at or above some probability are a prefix of the descending order, and once their
    weights come to `top_p` of the total, the nucleus is among them. The last bound needs no such
    check: tokens below (1 - top_p) / V together have less than the 1 - top_p that may be left out.
    """
    total = float(sums.sum(dtype=np.float64))
    for divisor in (512, 16 * 512, 2 * max(weights.size, 16 * 512)):
        ids = _at_least(weights, total * (1.0 - top_p) / divisor, scratch)
        inside = float(weights[ids].sum(dtype=np.float64))
        if inside >= (top_p + 1e-5 * (1.0 - top_p)) * total:
            break
    return ids, max(0.0, total - inside)


def _draw_by_id(weights: Logits, sums: NDArray[np.float32], u: float) -> int:
    """Inverse CDF over the whole vocabulary in order of id: first the block, then the token."""
    ends = sums.cumsum(dtype=np.float64)
    target = _within(u, float(ends[-1]))
    block = int(ends.searchsorted(target, side="right"))
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK].cumsum(dtype=np.float64)
    start = float(ends[block - 1]) if block else 0.0
    share = (target - start) / (float(ends[block]) - start)
    target = _within(share, float(inside[-1]))  # the block's float32 sum differs a little
    return block * _BLOCK + int(inside.searchsorted(target, side="right"))


def _weigh(
    logits: Logits, shift: float, inv_temperature: float, scratch: Scratch
) -> NDArray[np.float32]:
    """Put exp((logits - shift) * inv_temperature) into scratch.weights; returns sums by block.

    In float32, with a relative error of up to 2e-6 at exponents of 40.
    """
    out, factor = scratch.weights, np.float32(inv_temperature * scratch.exponent_unit)
    if shift:
        np.subtract(logits, np.float32(shift), out=out)
        np.multiply(out, factor, out=out)
    else:
        np.multiply(logits, factor, out=out)
    scratch.exp(out, out=out)
    return _block_sums(scratch.blocks)


def _block_sums(blocks: NDArray[np.float32]) -> NDArray[np.float32]:
    sums: NDArray[np.float32] = np.einsum("ij->i", blocks)  # 4x faster than sum(axis=1)
    return sums


def _log_normalizer(logits: Logits, scratch: Scratch) -> float:
    """log(sum(exp(logits))), nats."""
    peak = float(logits.max())
    if not math.isfinite(peak):
        return peak  # `_draw` will say what is wrong
    return peak + math.log(_weigh(logits, peak, 1.0, scratch).sum(dtype=np.float64))


def _alternatives(logits: Logits, nats: float, count: int) -> tuple[TokenAlternative, ...]:
    if count == 0 or not math.isfinite(nats):
        return ()
    ids = _descending(logits, _largest(logits, min(count, logits.size)))[:count]
    return tuple(TokenAlternative(int(i), float(logits[i]) - nats) for i in ids)


def _largest(logits: Logits, count: int) -> Ids:
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


def _at_least(values: Logits, bound: float, scratch: Scratch) -> Ids:
    return np.greater_equal(values, np.float32(bound), out=scratch.mask).nonzero()[0]


def _descending(logits: Logits, ids: Ids) -> Ids:
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
