"""GPTQ against the textbook algorithm, and what it is for."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.exporters.quant import gptq
from headrace.exporters.quant.formats import quantize_blocks_4bit, quantize_row_int8
from headrace.exporters.quant.gptq import DAMPING, gptq_codes


def layer(seed: int = 0, width: int = 96, outputs: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """A weight [outputs, width] and the Gram matrix of inputs that depend on each other."""
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((300, width)) @ rng.standard_normal((width, width))
    weight = rng.standard_normal((outputs, width)).astype(np.float32)
    return weight, (inputs.T @ inputs).astype(np.float32)


def damage(error: np.ndarray, gram: np.ndarray) -> float:
    return float(np.einsum("oi,ij,oj->", error, gram, error))


def textbook(weight: np.ndarray, gram: np.ndarray, scales: np.ndarray, top: int) -> np.ndarray:
    """Frantar et al. 2023 as published: column by column, with the inverse of the Gram matrix."""
    order = np.argsort(-np.diag(gram), kind="stable")
    damped = gram[np.ix_(order, order)].astype(np.float64)
    damped += np.eye(len(order)) * DAMPING * np.diag(damped).mean()
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T
    left = weight[:, order].astype(np.float64)
    codes = np.empty_like(left)
    for i in range(len(order)):
        codes[:, i] = np.clip(np.rint(left[:, i] / scales[:, 0]), -top, top)
        error = (left[:, i] - codes[:, i] * scales[:, 0]) / upper[i, i]
        left[:, i:] -= np.outer(error, upper[i, i:])
    result = np.empty_like(codes)
    result[:, order] = codes
    return result


@pytest.mark.parametrize("top", [7, 127])
def test_codes_are_those_of_the_textbook(top: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, gram = layer()
    scales = np.abs(weight).max(axis=1, keepdims=True) / np.float32(top)
    expected = textbook(weight, gram, scales, top)
    for block, slab in ((64, 4096), (7, 13)):
        monkeypatch.setattr(gptq, "_BLOCK", block)
        monkeypatch.setattr(gptq, "_SLAB", slab)
        codes = gptq_codes(weight, gram, scales, 0.0, -top, top)
        # A value half way between two codes may go either way, and later ones follow it.
        assert (codes != expected).mean() < 0.02
        assert np.abs(codes).max() <= top


def test_row_int8_and_blocks_do_less_damage_than_rounding_to_nearest() -> None:
    weight, gram = layer()
    for quantize in (quantize_row_int8, lambda *args: quantize_blocks_4bit(args[0], 32, *args[1:])):
        nearest, gptq_rounded = (quantize(*args) for args in ((weight,), (weight, gram)))
        errors = [damage(q.dequantize() - weight, gram) for q in (nearest, gptq_rounded)]
        assert errors[1] < 0.7 * errors[0]


def test_independent_inputs_are_rounded_to_nearest() -> None:
    weight, _ = layer()
    gram = np.diag(np.arange(1, 97)).astype(np.float32)
    np.testing.assert_array_equal(
        quantize_row_int8(weight, gram).codes, quantize_row_int8(weight).codes
    )


def test_inputs_that_are_never_seen_do_no_harm() -> None:
    weight, gram = layer()
    gram[10:20] = gram[:, 10:20] = 0
    values = quantize_row_int8(weight, gram).dequantize()
    assert np.isfinite(values).all()
    assert np.isfinite(quantize_blocks_4bit(weight, 32, np.zeros_like(gram)).scales).all()
