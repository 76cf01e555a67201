"""Weight formats: how a float matrix becomes the arrays that a graph stores, and back.

Every weight here is [out, in] float32, as checkpoints hold it. Each `quantize_*` has its
`dequantize` twin, which says exactly what the kernel multiplies with.

Row INT8 (`w8a8_row`)
    codes int8 [out, in] in [-127, 127], scales float32 [out]; weight = codes * scales[:, None].
    A GEMM stores the codes transposed, [in, out], as MatMulIntegerToFloat wants them.

Row INT8 of reduced range (`w7a8_row`)
    The same with codes in [-63, 63]. x86-64 without VNNI adds two products u8 x s8 in 16 bits that
    saturate at 32,767: 2 * 255 * 127 is twice that, 2 * 255 * 63 is below.

Blocks (`w8a8_block`, `w4a8_block`; MatMulNBits, GatherBlockQuantized)
    Blocks of `block_size` values along `in`; scales float32 [out, in/block_size];
    weight = (code - zero_point) * scale. 8-bit codes are uint8 [out, blocks, block_size] with
    zero point 128. 4-bit codes are packed two to a byte, [out, blocks, block_size/2], the value
    of lower index in the low nibble; their zero points are packed the same way along blocks,
    uint8 [out, ceil(blocks/2)], or given as float32 [out, blocks].
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headrace.exporters.quant.gptq import gptq_codes

Float = NDArray[np.float32]
_TINY = np.float32(1e-30)
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)  # of a 4-bit block's range


@dataclass(frozen=True, slots=True)
class RowInt8:
    """codes int8 [out, in] in [-max_code, max_code], scales float32 [out]."""

    codes: NDArray[np.int8]
    scales: Float
    max_code: int = 127

    def rows(self, where: slice) -> RowInt8:
        """Of some outputs."""
        return RowInt8(self.codes[where], self.scales[where], self.max_code)

    def dequantize(self) -> Float:
        return self.codes.astype(np.float32) * self.scales[:, None]


def quantize_row_int8(weight: Float, gram: Float | None = None, max_code: int = 127) -> RowInt8:
    """One symmetric scale per output channel; rounded by GPTQ where `gram` is known.

    Without it to nearest. `gram` float32 [in, in] is the sum of x x' over the layer's inputs.
    """
    peaks = np.maximum(np.abs(weight).max(axis=1), _TINY)
    scales = (peaks / np.float32(max_code)).astype(np.float32)
    if gram is None:
        codes = np.rint(weight / scales[:, None])
    else:
        codes = gptq_codes(weight, gram, scales[:, None], 0.0, -max_code, max_code)
    return RowInt8(codes.astype(np.int8), scales, max_code)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Block-quantized weight in MatMulNBits layout (module docstring).

    `zero_points` is None for 2^(bits-1), packed uint8, or float32 [out, blocks].
    """

    bits: int
    block_size: int
    codes: NDArray[np.uint8]
    scales: Float
    zero_points: NDArray[np.uint8] | Float | None = None

    def rows(self, where: slice | NDArray[np.int64]) -> Blocks:
        """Of some outputs."""
        zero = None if self.zero_points is None else self.zero_points[where]
        return replace(self, codes=self.codes[where], scales=self.scales[where], zero_points=zero)

    def dequantize(self) -> Float:
        out, blocks = self.scales.shape
        codes = self.codes if self.bits == 8 else unpack_nibbles(self.codes)
        zero: Float
        if self.zero_points is None:
            zero = np.array([1 << (self.bits - 1)], np.float32)
        elif self.zero_points.dtype == np.uint8:
            packed = self.zero_points.view(np.uint8)
            zero = unpack_nibbles(packed)[:, :blocks, None].astype(np.float32)
        else:
            zero = self.zero_points.view(np.float32)[:, :, None]
        values = (codes.astype(np.float32) - zero) * self.scales[:, :, None]
        return np.asarray(values, dtype=np.float32).reshape(out, -1)


def quantize_blocks_8bit(weight: Float, block_size: int) -> Blocks:
    """Symmetric round to nearest, zero point 128."""
    blocks = _blocked(weight, block_size)
    scales = np.maximum(np.abs(blocks).max(axis=2), _TINY) / np.float32(127)
    codes = np.rint(blocks / scales[:, :, None]) + np.float32(128)
    return Blocks(8, block_size, codes.astype(np.uint8), scales.astype(np.float32))


def quantize_blocks_4bit(weight: Float, block_size: int, gram: Float | None = None) -> Blocks:
    """Asymmetric, with packed zero points: a grid over [min(block, 0), max(block, 0)].

    Without `gram` rounded to nearest. With it (float32 [in, in], the sum of x x' over the layer's
    inputs) the range of each block is shrunk where that lowers its error, weighted with the
    diagonal of `gram`, and codes are rounded by GPTQ.
    """
    blocks = _blocked(weight, block_size)
    if gram is None:
        scales, zero = _grid_4bit(blocks, 1.0)
        codes = _nearest_4bit(blocks, scales, zero)
    else:
        scales, zero = _clipped_grid_4bit(blocks, np.diag(gram).reshape(-1, block_size))
        scale_of, zero_of = (np.repeat(part, block_size, axis=1) for part in (scales, zero))
        codes = gptq_codes(weight, gram, scale_of, zero_of, 0, 15).reshape(blocks.shape)
    packed_zero = pack_nibbles(zero.astype(np.uint8))
    return Blocks(4, block_size, pack_nibbles(codes.astype(np.uint8)), scales, packed_zero)


def _grid_4bit(blocks: Float, shrink: float) -> tuple[Float, Float]:
    """Scales and zero points, whole numbers from 0 to 15: float32 [out, blocks] each."""
    low = np.minimum(blocks.min(axis=2), 0) * np.float32(shrink)
    high = np.maximum(blocks.max(axis=2), 0) * np.float32(shrink)
    scales = (np.maximum(high - low, _TINY) / np.float32(15)).astype(np.float32)
    return scales, np.clip(np.rint(-low / scales), 0, 15)


def _nearest_4bit(blocks: Float, scales: Float, zero: Float) -> Float:
    return np.asarray(np.clip(np.rint(blocks / scales[:, :, None]) + zero[:, :, None], 0, 15))


def _clipped_grid_4bit(blocks: Float, importance: Float) -> tuple[Float, Float]:
    """The grid of least squared error, weighted with `importance` [blocks, block_size]."""
    scales, zero = _grid_4bit(blocks, 1.0)
    least = np.full(scales.shape, np.inf, np.float32)
    for shrink in _SHRINKS:
        tried = _grid_4bit(blocks, shrink)
        values = (_nearest_4bit(blocks, *tried) - tried[1][:, :, None]) * tried[0][:, :, None]
        error = np.einsum("obk,bk->ob", np.square(blocks - values), importance)
        better = error < least
        least = np.where(better, error, least)
        scales, zero = np.where(better, tried[0], scales), np.where(better, tried[1], zero)
    return scales, zero


def pack_nibbles(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """uint8 [..., n] of values 0..15 -> uint8 [..., ceil(n/2)], lower index in the low nibble."""
    if values.shape[-1] % 2:
        values = np.concatenate([values, np.zeros_like(values[..., :1])], axis=-1)
    return values[..., 0::2] | (values[..., 1::2] << np.uint8(4))


def unpack_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Twin of `pack_nibbles`: uint8 [..., m] -> uint8 [..., 2m]."""
    pairs = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
    return pairs.reshape(*packed.shape[:-1], -1)


def _blocked(weight: Float, block_size: int) -> Float:
    out, width = weight.shape
    assert width % block_size == 0, "the caller falls back for widths that are no multiple"
    return weight.reshape(out, width // block_size, block_size)
