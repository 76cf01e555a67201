"""What ranks know of their own tokens' logits, put together. Pure functions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float32]


def entropy_nats(head_sums: Float) -> Float:
    """Of the softmax over all ranks' tokens, float32 [R].

    With m the largest logit of all and S the sum of e^(x - m), H = ln S - E[x - m].

    Args:
        head_sums: float32 [ranks, R, 3], as `manifest.HEAD_SUMS`.
    """
    top, powers, below = np.moveaxis(head_sums.astype(np.float64), 2, 0)
    shift = top - top.max(axis=0)
    weight = np.exp(shift)
    total = (weight * powers).sum(axis=0)
    mean = (weight * (below + shift * powers)).sum(axis=0) / total
    return np.asarray(np.log(total) - mean, np.float32)
