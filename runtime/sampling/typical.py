"""Typical acceptance: a draft is taken if it is not improbable, instead of if it is what is drawn.

Medusa's rule (Cai et al., 2024, https://arxiv.org/abs/2401.10774, section 2.3.1): p(draft) >=
min(epsilon, delta * exp(-H)), with p and its entropy H (nats) after temperature, and the delta that
they use, sqrt(epsilon). It is lossy: texts are not distributed as the model's, and depend on what
was drafted.
"""

from __future__ import annotations

import math

import numpy as np

from headrace.runtime.sampling.candidates import Logits, Scratch, weigh


def is_typical(
    logits: Logits, token_id: int, inv_temperature: float, epsilon: float, scratch: Scratch
) -> bool:
    """Whether a draft may be taken, by the whole of softmax(logits * inv_temperature).

    Args:
        logits: float32 [vocab]; minus infinity where a token is banned.
        epsilon: above 0.
    """
    peak = float(logits.max())
    if not math.isfinite(peak):
        return False  # the draw will say what is wrong
    total = float(weigh(logits, peak, inv_temperature, scratch).sum(dtype=np.float64))
    weights = scratch.weights
    some = weights[weights > 0].astype(np.float64)
    entropy_nats = math.log(total) - float(some @ np.log(some)) / total
    threshold = min(epsilon, math.sqrt(epsilon) * math.exp(-entropy_nats))
    return float(weights[token_id]) / total >= threshold
