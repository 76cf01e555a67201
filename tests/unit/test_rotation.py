"""Orthogonal matrices of the offline rotation; the graph that uses them is in tests/graph."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.exporters.quant.hadamard import hadamard
from headrace.exporters.rotation import orthogonal


@pytest.mark.parametrize("size", [1, 2, 4, 12, 20, 64, 72, 96, 576, 896, 960])
def test_hadamard(size: int) -> None:
    matrix = hadamard(size)
    assert matrix is not None
    assert set(np.unique(matrix)) <= {-1, 1}
    product = matrix.astype(np.int64) @ matrix.astype(np.int64).T
    np.testing.assert_array_equal(product, size * np.eye(size, dtype=np.int64))


@pytest.mark.parametrize("size", [3, 6, 36, 52, 100])
def test_no_hadamard_of_that_size_is_built(size: int) -> None:
    assert hadamard(size) is None


@pytest.mark.parametrize("size", [5, 36, 48, 128])
def test_rotations_are_orthogonal_and_always_the_same(size: int) -> None:
    q = orthogonal(size)
    np.testing.assert_allclose(q @ q.T, np.eye(size), atol=1e-5)
    np.testing.assert_array_equal(q, orthogonal(size))
    assert not np.array_equal(q, orthogonal(size, seed=1))
