"""Packing and quantization against their dequantizing twins."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from headrace.exporters.checkpoint.values import QuantBlocks
from headrace.exporters.quant.formats import (
    pack_nibbles,
    quantize_blocks_4bit,
    quantize_blocks_8bit,
    quantize_row_int8,
    unpack_nibbles,
)
from headrace.exporters.weight_source import matmul_blocks

weights = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 5), st.sampled_from([32, 64])),
    elements=st.floats(-100, 100, width=32),
)


@given(
    hnp.arrays(
        np.uint8, st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=st.integers(0, 15)
    )
)
def test_nibbles_round_trip(values: np.ndarray) -> None:
    packed = pack_nibbles(values)
    assert packed.shape[1] == (values.shape[1] + 1) // 2
    np.testing.assert_array_equal(unpack_nibbles(packed)[:, : values.shape[1]], values)


def test_lower_index_is_the_low_nibble() -> None:
    assert pack_nibbles(np.array([3, 10], np.uint8)).tolist() == [3 | 10 << 4]


@given(weights)
def test_row_int8_is_within_half_a_step(weight: np.ndarray) -> None:
    quantized = quantize_row_int8(weight)
    step = np.abs(weight).max(axis=1, keepdims=True) / 127
    assert (np.abs(quantized.dequantize() - weight) <= step * 0.501 + 1e-30).all()
    assert np.abs(quantized.codes.astype(int)).max() <= 127


@given(weights)
def test_reduced_codes_never_saturate_16_bits(weight: np.ndarray) -> None:
    quantized = quantize_row_int8(weight, max_code=63)
    codes = np.abs(quantized.codes.astype(int))
    assert quantized.max_code == 63 and 2 * 255 * codes.max() < 1 << 15
    step = np.abs(weight).max(axis=1, keepdims=True) / 63
    assert (np.abs(quantized.dequantize() - weight) <= step * 0.501 + 1e-30).all()


@given(weights)
def test_blocks_8bit_are_within_half_a_step(weight: np.ndarray) -> None:
    blocks = quantize_blocks_8bit(weight, 32)
    assert np.abs(blocks.dequantize() - weight).max() <= blocks.scales.max() * 0.501


@given(weights)
def test_blocks_4bit_are_within_a_step(weight: np.ndarray) -> None:
    # Half a step of the code and half a step of the rounded zero point.
    blocks = quantize_blocks_4bit(weight, 32)
    assert np.abs(blocks.dequantize() - weight).max() <= blocks.scales.max() * 1.001


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("offsets", [False, True])
def test_checkpoint_blocks_keep_their_values(bits: int, offsets: bool) -> None:
    rng = np.random.default_rng(1)
    low = 0 if offsets else -(1 << (bits - 1))
    codes = rng.integers(low, low + (1 << bits), (3, 64)).astype(np.uint8 if offsets else np.int8)
    scales = rng.uniform(0.01, 1, (3, 2)).astype(np.float16).astype(np.float32)
    minimum = rng.uniform(-1, 1, (3, 2)).astype(np.float16).astype(np.float32)
    if offsets:
        scales[1, 1] = 0  # a block that holds one value only
    source = QuantBlocks(bits, 32, codes, scales, minimum if offsets else None)
    converted = matmul_blocks(source).dequantize()
    np.testing.assert_allclose(converted, source.dequantize(), rtol=1e-6, atol=2e-6)
