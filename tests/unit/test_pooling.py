"""Pooling against a loop over texts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from headrace.runtime.encoder.pooling import normalized, pool

LENGTHS = [3, 1, 7, 2]
STATES = np.random.default_rng(0).standard_normal((sum(LENGTHS), 16)).astype(np.float32)


@pytest.mark.parametrize("mode", ["mean", "cls", "max"])
def test_pooling_is_the_loop(mode: str) -> None:
    one = {"mean": lambda s: s.mean(axis=0), "cls": lambda s: s[0], "max": lambda s: s.max(axis=0)}
    starts = np.cumsum([0, *LENGTHS])
    texts = [STATES[a:b] for a, b in itertools.pairwise(starts)]
    vectors = pool(STATES, LENGTHS, mode)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, [one[mode](text) for text in texts], atol=1e-6)


@pytest.mark.parametrize("mode", ["mean", "cls", "max"])
def test_a_text_is_pooled_alike_in_any_company(mode: str) -> None:
    together, alone = pool(STATES, LENGTHS, mode), pool(STATES[:3], LENGTHS[:1], mode)
    assert together[0].tobytes() == alone[0].tobytes()


def test_normalized_rows_have_length_1() -> None:
    vectors = normalized(STATES)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    np.testing.assert_array_equal(normalized(np.zeros((1, 4), np.float32)), 0)
