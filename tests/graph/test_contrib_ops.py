"""The operators of `contrib_ops` against ONNX Runtime's CPU kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from contrib_ops import rms_norm
from one_node import cpu_kernel, half_steps, normal, reference

from headrace.exporters.quant.formats import quantize_blocks_4bit, quantize_blocks_8bit


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_matmul_nbits(bits: int, block_size: int, dtype: Any) -> None:
    weight = normal(24, 96)
    blocks = (quantize_blocks_8bit if bits == 8 else quantize_blocks_4bit)(weight, block_size)
    x = normal(5, 96, dtype=dtype)
    feeds = {
        "x": x,
        "codes": blocks.codes,
        "scales": blocks.scales.astype(dtype),
        "zeros": blocks.zero_points,
    }
    shape = {"K": 96, "N": 24, "bits": bits, "block_size": block_size}
    (actual,) = reference("MatMulNBits", feeds, **shape)
    (kernel,) = cpu_kernel("MatMulNBits", feeds, **shape, dtype=dtype)
    assert actual.dtype == kernel.dtype == dtype
    # The CPU kernel widens halves and does not round weights: 96 of them in random directions.
    assert half_steps(actual, kernel) < (0.01 if dtype == np.float32 else 3)
    assert half_steps(actual, x.astype(np.float64) @ blocks.dequantize().T) < 3


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_gather_block_quantized(dtype: Any) -> None:
    blocks = quantize_blocks_8bit(normal(20, 64), 32)
    feeds = {
        "codes": blocks.codes.reshape(20, 64),
        "ids": np.array([3, 0, 19, 3]),
        "scales": blocks.scales.astype(dtype),
    }
    shape = {"bits": 8, "block_size": 32, "gather_axis": 0, "quantize_axis": 1}
    (actual,) = reference("GatherBlockQuantized", feeds, **shape)
    (kernel,) = cpu_kernel("GatherBlockQuantized", feeds, **shape, dtype=dtype)
    assert actual.dtype == kernel.dtype == dtype
    assert half_steps(actual, kernel) <= 1


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_skip_norm(dtype: Any) -> None:
    feeds = {
        "x": normal(7, 64, dtype=dtype),
        "skip": normal(7, 64, dtype=dtype) * 3,
        "gain": normal(64, dtype=dtype),
    }
    actual = reference("SkipSimplifiedLayerNormalization", feeds, outputs=1, epsilon=1e-5)
    kernel = cpu_kernel(
        "SkipSimplifiedLayerNormalization", feeds, outputs=1, epsilon=1e-5, dtype=dtype
    )
    assert half_steps(actual[0], kernel[0]) < (0.01 if dtype == np.float32 else 2)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_rms_norm(dtype: Any) -> None:
    feeds = {"x": normal(7, 64, dtype=dtype), "gain": normal(64, dtype=dtype)}
    options: dict[str, Any] = {"domain": "", "epsilon": 1e-5, "axis": -1, "stash_type": 1}
    (actual,) = reference("RMSNormalization", feeds, **options)
    (kernel,) = cpu_kernel("RMSNormalization", feeds, **options, dtype=dtype)
    assert half_steps(actual, kernel) < (0.01 if dtype == np.float32 else 2)


def test_rms_norm_of_halves_with_a_float32_gain_is_float32() -> None:
    """The CPU has no kernel for these types; CUDA has."""
    feeds = {"x": normal(7, 64, dtype=np.float16), "gain": normal(64)}
    (actual,) = reference("RMSNormalization", feeds, domain="", epsilon=1e-5, axis=-1)
    assert actual.dtype == np.float32
    np.testing.assert_array_equal(
        actual, rms_norm(feeds["x"].astype(np.float32), feeds["gain"], 1e-5)
    )


@pytest.mark.parametrize("op", ["MatMul", "Gemm"])
def test_products_of_halves_are_summed_in_float32(op: str) -> None:
    """1 + 2048 * 2^-12 is 1.5; summed in FP16, what is added to 1 would round away each time."""
    x = np.full((1, 2049), 2**-12, np.float16)
    x[0, 0] = 1
    (y,) = reference(op, {"a": x, "b": np.ones((2049, 1), np.float16)}, domain="")
    assert y == np.float16(1.5) and y.dtype == np.float16


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_quick_gelu(dtype: Any) -> None:
    x = normal(5, 9, dtype=dtype) * 4
    (actual,) = reference("QuickGelu", {"x": x}, alpha=1.0)
    if dtype == np.float32:
        (kernel,) = cpu_kernel("QuickGelu", {"x": x}, alpha=1.0)
        np.testing.assert_allclose(actual, kernel, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(actual, x / (1 + np.exp(-x.astype(np.float64))), rtol=1e-3)
