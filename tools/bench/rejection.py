"""Rejection sampling of drafts, as others verify them: the baseline of keyed verification.

A draft x that was drawn from q is accepted with probability min(1, p(x) / q(x)); otherwise the
token is drawn from max(p - q, 0), normalized. So it is distributed as p, and the share that is
accepted is the sum of min(p, q) (Leviathan et al., 2023, https://arxiv.org/abs/2211.17192; Chen et
al., 2023, https://arxiv.org/abs/2302.01318). The random numbers are those of (seed, position).

Distributions are float64 [vocab] and sum to 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.runtime.config import GenerationConfig
from headrace.runtime.sampling.sampler import sample_seed, uniform

Distribution = NDArray[np.float64]

# Of one position: which draft, whether it is accepted, and what else.
_DRAFT, _ACCEPT, _OTHER = 1, 2, 3


def filtered(logits: NDArray[np.float32], config: GenerationConfig) -> Distribution:
    """What the sampler draws from: softmax after temperature, cut by top_k, top_p and min_p.

    Args:
        logits: [vocab], adjusted.
    """
    order = (-logits).argsort(kind="stable")
    scaled = logits[order].astype(np.float64) / config.temperature
    weights = np.exp(scaled - scaled[0])
    kept = weights[: config.top_k or None].copy()
    before = np.concatenate([[0.0], kept.cumsum()[:-1]])
    kept[before >= config.top_p * kept.sum()] = 0.0
    kept[weights[: kept.size] < config.min_p] = 0.0
    found = np.zeros(logits.size)
    found[order[: kept.size]] = kept / kept.sum()
    return found


def propose(q: Distribution, seed: int, position: int) -> int:
    """A draft drawn from `q`."""
    return _draw(q, uniform(sample_seed(seed, _DRAFT), position))


def verify(
    p: Distribution, q: Distribution, draft: int, seed: int, position: int
) -> tuple[int, bool]:
    """The token at a position for which `draft` was drawn from `q`, and whether it is the draft."""
    u = uniform(sample_seed(seed, _ACCEPT), position)
    if u * q[draft] < p[draft]:
        return draft, True
    rest = np.maximum(p - q, 0.0)
    return _draw(rest / rest.sum(), uniform(sample_seed(seed, _OTHER), position)), False


def acceptance(p: Distribution, q: Distribution) -> float:
    """Chance that a draft from `q` is accepted."""
    return float(np.minimum(p, q).sum())


def _draw(distribution: Distribution, u: float) -> int:
    """Inverse CDF in order of id."""
    cumulative = distribution.cumsum()
    return int(cumulative.searchsorted(u * cumulative[-1], side="right"))
