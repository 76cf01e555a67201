"""Hadamard matrices of the sizes that models have."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def hadamard(size: int) -> NDArray[np.int8] | None:
    """+-1 [size, size] with H H' = size I, or None where this construction has none.

    Sylvester: H_2n = [[H_n, H_n], [H_n, -H_n]], from H_1 or from Paley's first construction, of
    size q + 1 for a prime q = 3 mod 4.
    """
    core = size
    while core % 2 == 0 and not _is_paley_size(core) and core > 1:
        core //= 2
    if core == 1:
        matrix = np.ones((1, 1), np.int8)
    elif _is_paley_size(core):
        matrix = _paley(core - 1)
    else:
        return None
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]]).astype(np.int8)
    return matrix


def _is_paley_size(size: int) -> bool:
    q = size - 1
    return q % 4 == 3 and all(q % d for d in range(2, int(q**0.5) + 1))


def _paley(q: int) -> NDArray[np.int8]:
    """I + S with S = [[0, 1'], [-1, Q]], Q[i, j] = chi(i - j), chi the quadratic character."""
    squares = {x * x % q for x in range(1, q)}
    character = np.array([0] + [1 if x in squares else -1 for x in range(1, q)], np.int8)
    index = np.arange(q)
    matrix = np.eye(q + 1, dtype=np.int8)
    matrix[0, 1:] = 1
    matrix[1:, 0] = -1
    matrix[1:, 1:] += character[(index[:, None] - index[None, :]) % q]
    return matrix
