"""How far one model's next-token distributions are from another's. Pure functions of logits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float32]
Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fidelity:
    """How far a model is from its FP32 reference over `num_tokens` positions of a text.

    `*_kl_nats` are of D(reference || model), the 99th percentile interpolated linearly;
    `top1_agreement` is the share of equal argmaxes. Perplexity is exp of the mean negative log
    probability of the token that comes next in the text, NaN where none does.

    `perplexity_change_error` is the standard error of `perplexity_change`, with the tokens that the
    meter was given together as one draw, since tokens of a text are not independent; NaN where
    there are fewer than two draws.
    """

    num_tokens: int
    mean_kl_nats: float
    p99_kl_nats: float
    top1_agreement: float
    perplexity: float
    perplexity_fp32: float
    perplexity_change_error: float

    @property
    def perplexity_change(self) -> float:
        """0.01 where the model's perplexity is 1% above the reference's."""
        return self.perplexity / self.perplexity_fp32 - 1

    def to_dict(self) -> dict[str, float | None]:
        """For JSON, which has no NaN: None where there is no figure."""
        found = dataclasses.asdict(self)
        return {name: None if math.isnan(value) else value for name, value in found.items()}


class FidelityMeter:
    """Collects rows of logits of two models for the same positions."""

    def __init__(self) -> None:
        self._kl: list[Float64] = []
        self._same = 0
        self._surprise: list[tuple[Float64, Float64]] = []

    def add(self, reference: Float, model: Float, next_ids: Sequence[int] = ()) -> None:
        """Two arrays of logits, float32 [rows, vocab], and the tokens that come next.

        The last row may lack its next token: `next_ids` has `rows` or `rows - 1` entries, or none.
        """
        if not len(reference):
            return
        p, q = log_softmax(reference), log_softmax(model)
        self._kl.append(_kl_nats(p, q))
        self._same += int((reference.argmax(axis=1) == model.argmax(axis=1)).sum())
        rows = np.arange(len(next_ids))
        taken = [-logs[rows, list(next_ids)].astype(np.float64) for logs in (p, q)]
        self._surprise.append((taken[0], taken[1]))

    def result(self) -> Fidelity:
        kl = np.concatenate(self._kl)
        reference, model = (np.concatenate([pair[i] for pair in self._surprise]) for i in range(2))
        return Fidelity(
            num_tokens=len(kl),
            mean_kl_nats=float(kl.mean()),
            p99_kl_nats=float(np.quantile(kl, 0.99)),
            top1_agreement=self._same / len(kl),
            perplexity=_perplexity(model),
            perplexity_fp32=_perplexity(reference),
            perplexity_change_error=_change_error([b - a for a, b in self._surprise]),
        )


def log_softmax(logits: Float) -> Float:
    """float32 [rows, n] -> [rows, n], the normalizer summed in float64."""
    shifted: Float = logits - logits.max(axis=1, keepdims=True)
    total = np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)
    result: Float = shifted - np.log(total).astype(np.float32)
    return result


def mean_kl_nats(log_p: Float, log_q: Float) -> float:
    """Mean D(p || q) over rows of log probabilities, float32 [rows, n] each."""
    return float(_kl_nats(log_p, log_q).mean())


def _kl_nats(log_p: Float, log_q: Float) -> Float64:
    return np.asarray((np.exp(log_p) * (log_p - log_q)).sum(axis=1, dtype=np.float64))


def _perplexity(surprise_nats: Float64) -> float:
    return math.exp(surprise_nats.mean()) if len(surprise_nats) else math.nan


def _change_error(added_nats: Sequence[Float64]) -> float:
    """Standard error of exp(mean) of draws of several tokens each (a ratio of two means)."""
    draws = [draw for draw in added_nats if len(draw)]
    if len(draws) < 2:
        return math.nan
    sums, counts = (np.array([f(draw) for draw in draws]) for f in (np.sum, len))
    mean = sums.sum() / counts.sum()
    variance = np.square(sums - mean * counts).sum() * len(draws) / (len(draws) - 1)
    return float(np.exp(mean) * np.sqrt(variance) / counts.sum())


def spread_chunks(ids: Sequence[int], count: int, size: int) -> list[list[int]]:
    """At most `count` chunks of `size` tokens, evenly spread over a text and not overlapping.

    A text shorter than `size` is one chunk.
    """
    if len(ids) <= size:
        return [list(ids)] if ids else []
    count = min(count, len(ids) // size)
    stride = (len(ids) - size) // max(count - 1, 1)
    return [list(ids[i * stride : i * stride + size]) for i in range(count)]


def first_difference(expected: Sequence[int], actual: Sequence[int]) -> int:
    """Tokens that two answers share from their start."""
    shared = zip(expected, actual, strict=False)
    return next((i for i, (a, b) in enumerate(shared) if a != b), min(len(expected), len(actual)))
