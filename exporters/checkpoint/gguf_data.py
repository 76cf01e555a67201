"""Tensor data of a GGUF file: blocks as stored, or as float32.

Rows are read a few at a time, so that loading needs little more than the result. Query and key
rows of some architectures are stored in another order than Hugging Face has; `row_order` undoes
that: row i of the result is stored row `row_order[i]`.
"""

from __future__ import annotations

import math
import threading
from io import BufferedReader
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from headrace.exporters.checkpoint.gguf_header import GgufTensor
from headrace.exporters.checkpoint.values import Float, QuantBlocks
from headrace.runtime.errors import CheckpointError

_CHUNK_VALUES = 1 << 20

RowOrder = NDArray[np.int64]
Bytes = NDArray[np.uint8]


class DataFile:
    """Random access to a file; may be used from several threads."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        try:
            self._stream: BufferedReader = path.open("rb")
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None

    def close(self) -> None:
        self._stream.close()

    def read(self, offset_bytes: int, size_bytes: int) -> Bytes:
        """A new uint8 array.

        Raises:
            CheckpointError: closed, unreadable, or shorter than when it was opened.
        """
        buffer = np.empty(size_bytes, np.uint8)
        try:
            with self._lock:
                self._stream.seek(offset_bytes)
                got = self._stream.readinto(buffer.data)
        except (OSError, ValueError) as error:  # ValueError: the file was closed
            raise CheckpointError(f"{self._path} cannot be read: {error}") from None
        if got != size_bytes:
            raise CheckpointError(f"{self._path} was truncated while it was read")
        return buffer


def load_float32(file: DataFile, tensor: GgufTensor, row_order: RowOrder | None) -> Float:
    """The whole tensor, float32 of `tensor.shape`.

    Raises:
        CheckpointError: the gguf package cannot dequantize its type.
    """
    rows, row_values, row_bytes = _geometry(tensor)
    values = np.empty((rows, row_values), np.float32)
    step = max(1, _CHUNK_VALUES // row_values)
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        raw = file.read(tensor.offset_bytes + start * row_bytes, (stop - start) * row_bytes)
        values[start:stop] = _dequantize(raw.reshape(stop - start, row_bytes), tensor)
    whole = values.reshape(tensor.shape)
    return whole if row_order is None else whole[row_order]


def _dequantize(raw: Bytes, tensor: GgufTensor) -> NDArray[np.generic]:
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # damaged scales may be inf or nan
            return np.asarray(dequantize(raw, tensor.type))
    except NotImplementedError:
        raise CheckpointError(
            f"tensor {tensor.name!r} has type {tensor.type.name}, which cannot be converted to "
            "float; convert the checkpoint to F16, Q8_0 or a K-quant"
        ) from None


def has_blocks(tensor: GgufTensor) -> bool:
    return tensor.type in _SPLITTERS and len(tensor.shape) == 2


def load_blocks(file: DataFile, tensor: GgufTensor, row_order: RowOrder | None) -> QuantBlocks:
    """Blocks of a matrix for which `has_blocks`, rows in Hugging Face order."""
    block_size, block_bytes = GGML_QUANT_SIZES[tensor.type]
    rows, row_values, _ = _geometry(tensor)
    raw = file.read(tensor.offset_bytes, tensor.size_bytes)
    blocks = raw.reshape(rows, row_values // block_size, block_bytes)
    if row_order is not None:
        blocks = blocks[row_order]
    return _SPLITTERS[tensor.type](blocks)


def _geometry(tensor: GgufTensor) -> tuple[int, int, int]:
    """Rows, values a row, bytes a row; a vector is one row."""
    row_values = tensor.shape[-1]
    block_size, block_bytes = GGML_QUANT_SIZES[tensor.type]
    return math.prod(tensor.shape[:-1]), row_values, row_values // block_size * block_bytes


def _split_q4_0(blocks: Bytes) -> QuantBlocks:
    """Block: float16 scale, 16 bytes of codes; value = (code - 8) * scale."""
    codes = _nibbles(blocks[..., 2:]).view(np.int8)
    codes -= np.int8(8)
    return QuantBlocks(4, 32, codes, _half(blocks, 0), None)


def _split_q4_1(blocks: Bytes) -> QuantBlocks:
    """Block: float16 scale, float16 minimum, 16 bytes of codes; value = code * scale + minimum."""
    return QuantBlocks(4, 32, _nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2))


def _split_q8_0(blocks: Bytes) -> QuantBlocks:
    """Block: float16 scale, 32 int8 codes; value = code * scale."""
    codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    return QuantBlocks(8, 32, codes.reshape(blocks.shape[0], -1), _half(blocks, 0), None)


def _half(blocks: Bytes, at: int) -> Float:
    """float16 at byte `at` of every block, as float32 [out, blocks]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0].astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """uint8 [out, blocks, 16] -> [out, blocks * 32]: low nibbles are values 0..15 of a block."""
    halves = np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
    return halves.reshape(packed.shape[0], -1)


_SPLITTERS = {
    GGMLQuantizationType.Q4_0: _split_q4_0,
    GGMLQuantizationType.Q4_1: _split_q4_1,
    GGMLQuantizationType.Q8_0: _split_q8_0,
}
