"""From token states to one vector a text. Pure functions; a text's vector depends on it alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float32]


def pool(states: Float, lengths: Sequence[int], mode: str) -> Float:
    """Vectors of packed texts.

    Args:
        states: float32 [sum(lengths), hidden], text after text.
        lengths: tokens of each text, none of them 0.
        mode: "mean", "cls" (the first token) or "max".

    Returns:
        float32 [len(lengths), hidden].
    """
    starts = np.cumsum([0, *lengths[:-1]])
    if mode == "cls":
        return np.asarray(states[starts])
    if mode == "max":
        return np.asarray(np.maximum.reduceat(states, starts, axis=0))
    sums = np.add.reduceat(states, starts, axis=0)
    return np.asarray(sums / np.array(lengths, np.float32)[:, None])


def normalized(vectors: Float) -> Float:
    """Each row divided by its length; a row of zeros stays one."""
    lengths = np.sqrt(np.einsum("nd,nd->n", vectors, vectors))
    return np.asarray(vectors / np.maximum(lengths, np.float32(1e-12))[:, None])
