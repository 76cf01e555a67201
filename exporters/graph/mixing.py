"""The basis that row INT8 rounds some inputs in: runs of MIX_WIDTH, each turned by a Hadamard
matrix."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.exporters.graph.functions import MIX_WIDTH
from headrace.exporters.quant.hadamard import hadamard

Float = NDArray[np.float32]


def mixing_matrix() -> Float:
    """The normalized Hadamard matrix, [MIX_WIDTH, MIX_WIDTH]; orthogonal."""
    signs = hadamard(MIX_WIDTH)
    assert signs is not None
    return np.asarray(signs / np.sqrt(MIX_WIDTH), np.float32)


def mix_runs(weight: Float) -> Float:
    """float32 [out, in]: every run of MIX_WIDTH inputs in the mixed basis."""
    runs = weight.reshape(-1, MIX_WIDTH)
    return np.asarray(runs @ mixing_matrix()).reshape(weight.shape)


def unmix_runs(weight: Float) -> Float:
    """The inverse of `mix_runs`."""
    runs = weight.reshape(-1, MIX_WIDTH)
    return np.asarray(runs @ mixing_matrix().T).reshape(weight.shape)
