"""GPTQ: round weights one input after another, each error made up for by the inputs to come.

For outputs y = W x the damage of rounding W to Q is (W - Q) G (W - Q)', with the Gram matrix
G = sum x x' over calibration text. GPTQ (Frantar et al. 2023) rounds inputs in order and adjusts
those not yet rounded. QuIP (Chee et al. 2023, theorem 6) shows that this equals

    Q[:, k] = round(W[:, k] + sum over j < k of (W[:, j] - Q[:, j]) * F[j, k])

with G = F D F', F upper triangular with a diagonal of ones: one Cholesky factorization and no
inverse. Inputs are taken by falling G[k, k], so that those that matter most are followed by others
that repair them. The grid (scale and zero point of every weight) is fixed before.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float32]
DAMPING = 0.01  # of the mean of G's diagonal, added to it
_BLOCK = 64  # inputs whose errors reach later ones together, as one product
_SLAB = 4096  # outputs rounded together; they do not depend on each other


def gptq_codes(
    weight: Float, gram: Float, scales: Float, zeros: Float | float, low: int, high: int
) -> Float:
    """Integers `q` in [low, high] of a grid `(q - zeros) * scales`, as whole float32 numbers.

    Args:
        weight: float32 [out, in].
        gram: float32 [in, in], sum of x x' over rows x of the layer's input.
        scales: float32 [out, in], or of a shape that broadcasts to it.
        zeros: float32 likewise.
    """
    order = np.argsort(-np.diag(gram), kind="stable")
    feedback = _feedback(gram[np.ix_(order, order)])
    scales = np.broadcast_to(scales, weight.shape)
    zeros = np.broadcast_to(np.asarray(zeros, np.float32), weight.shape)
    codes = np.empty_like(weight)
    for start in range(0, len(weight), _SLAB):
        slab = slice(start, start + _SLAB)
        # Transposed, so that one input's weights lie next to each other.
        part, scale_of, zero_of = (
            np.ascontiguousarray(p[slab].T[order]) for p in (weight, scales, zeros)
        )
        codes[slab, order] = _round_in_order(part, scale_of, zero_of, feedback, low, high).T
    return codes


def _round_in_order(
    weight: Float, scales: Float, zeros: Float, feedback: Float, low: int, high: int
) -> Float:
    """Codes [in, out] of a weight [in, out]."""
    wanted = weight.copy()
    codes = np.empty_like(weight)
    for start in range(0, len(weight), _BLOCK):
        stop = min(start + _BLOCK, len(weight))
        errors = np.empty_like(weight[start:stop])
        for i in range(start, stop):
            codes[i] = np.clip(np.rint(wanted[i] / scales[i] + zeros[i]), low, high)
            error = errors[i - start] = weight[i] - (codes[i] - zeros[i]) * scales[i]
            wanted[i + 1 : stop] += feedback[i, i + 1 : stop, None] * error
        wanted[stop:] += feedback[start:stop, stop:].T @ errors
    return codes


def _feedback(gram: Float) -> Float:
    """F of the module docstring for the damped Gram matrix.

    A Cholesky factorization from the last row up is that of the reversed matrix, reversed.
    """
    damped = gram.astype(np.float64)
    diagonal = np.einsum("ii->i", damped)  # a view
    diagonal += max(DAMPING * diagonal.mean(), 1e-30)
    factor = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
    return np.asarray(factor / np.diag(factor), np.float32)
