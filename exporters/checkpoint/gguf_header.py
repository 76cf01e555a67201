"""GGUF header: metadata and where each tensor lies. Bounds are checked before anything is read.

Layout (little endian; version 2 and 3):
    magic "GGUF", uint32 version, uint64 tensor count, uint64 key count,
    keys:    string name, uint32 value type, value
    tensors: string name, uint32 dimensions, uint64 [dimensions] (fastest first), uint32 type,
             uint64 offset from the start of the data
    padding up to the alignment, then the data
A string is uint64 length + UTF-8; an array is uint32 item type, uint64 count, items.

Written instead of using the gguf package's reader, which trusts counts and offsets and takes
seconds for a vocabulary.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from headrace.runtime.errors import CheckpointError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20
_MAX_DIMENSIONS = 4  # of any ggml tensor
_MAX_ARRAY_DEPTH = 4
_MAX_ITEMS = 1 << 24  # of an array; the largest vocabularies have some 2^18 tokens

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    _BOOL: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
# Fewest bytes that one key, tensor record, string or nested array can take.
_MIN_KEY_BYTES, _MIN_TENSOR_BYTES, _MIN_STRING_BYTES, _MIN_ARRAY_BYTES = 8 + 4 + 1, 24, 8, 12

Value = bool | int | float | str | NDArray[np.generic] | list["Value"]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor record. `shape` is row-major (last dimension contiguous), as numpy has it."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Arrays of numbers are numpy arrays, arrays of strings are lists."""

    metadata: dict[str, Value]
    tensors: tuple[GgufTensor, ...]


def read_header(path: Path) -> GgufHeader:
    """Parse and check the header of a GGUF file.

    Raises:
        CheckpointError: not GGUF, another version, damaged or truncated.
    """
    try:
        with (
            path.open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _Parser(data, path).header()
    except (OSError, ValueError) as error:  # ValueError: mmap of an empty file
        raise CheckpointError(f"{path} cannot be read: {error}") from None


class _Parser:
    """A cursor over the file that never moves past its end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data, self._path, self._size = data, path, len(data)
        self._at = 0

    def header(self) -> GgufHeader:
        if self._take(4, "the magic number") != MAGIC:
            raise self._error("is not a GGUF file")
        version = self._number("<I", "the version")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            kind = "big-endian GGUF" if swapped in _VERSIONS else f"GGUF version {version}"
            raise self._error(
                f"is {kind}; this exporter reads little-endian versions 2 and 3, convert it again"
            )
        tensor_count = self._count("<Q", _MIN_TENSOR_BYTES, "tensors")
        key_count = self._count("<Q", _MIN_KEY_BYTES, "metadata keys")
        metadata: dict[str, Value] = {}
        for _ in range(key_count):
            key = self._string("a metadata key")
            if key in metadata:
                raise self._error(f"is damaged: metadata key {key!r} occurs twice")
            where = f"metadata key {key!r}"
            metadata[key] = self._value(self._number("<I", where), where, _MAX_ARRAY_DEPTH)
        records = [self._tensor_record() for _ in range(tensor_count)]
        start = -(-self._at // (step := self._alignment(metadata))) * step
        return GgufHeader(metadata, self._place(records, start))

    def _tensor_record(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string("a tensor's name")
        where = f"tensor {name!r}"
        dimensions = self._number("<I", where)
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._error(f"is damaged: {where} has {dimensions} dimensions")
        shape = tuple(self._number("<Q", where) for _ in range(dimensions))[::-1]
        code = self._number("<I", where)
        try:
            kind = GGMLQuantizationType(code)
        except ValueError:
            raise self._error(
                f"has {where} in an unknown type ({code}); a newer gguf package may know it"
            ) from None
        return name, shape, kind, self._number("<Q", where)

    def _place(
        self, records: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]], start: int
    ) -> tuple[GgufTensor, ...]:
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in records:
            block_values, block_bytes = GGML_QUANT_SIZES[kind]
            count = math.prod(shape)
            if count == 0 or shape[-1] % block_values:
                raise self._error(
                    f"is damaged: tensor {name!r} of type {kind.name} has shape {list(shape)}"
                )
            size = count // block_values * block_bytes
            if start + offset + size > self._size:
                raise self._error(
                    f"is truncated: tensor {name!r} ends at byte {start + offset + size}, "
                    f"the file at {self._size}; download it again"
                )
            if name in tensors:
                raise self._error(f"is damaged: tensor {name!r} occurs twice")
            tensors[name] = GgufTensor(name, shape, kind, start + offset, size)
        return tuple(tensors.values())

    def _alignment(self, metadata: dict[str, Value]) -> int:
        value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(value) is not int or not 0 < value <= _MAX_ALIGNMENT or value & (value - 1):
            raise self._error(f"is damaged: general.alignment is {value!r}")
        return value

    def _value(self, kind: int, where: str, depth: int) -> Value:
        if kind == _STRING:
            return self._string(where)
        if kind == _ARRAY:
            return self._array(where, depth)
        if kind not in _SCALARS:
            raise self._error(f"is damaged: {where} has value type {kind}")
        value: bool | int | float = self._scalars(kind, 1, where)[0].item()
        return value

    def _array(self, where: str, depth: int) -> Value:
        kind = self._number("<I", where)
        if kind in _SCALARS:
            count = self._count("<Q", np.dtype(_SCALARS[kind]).itemsize, where)
            return self._scalars(kind, count, where)
        if kind == _STRING:
            count = self._count("<Q", _MIN_STRING_BYTES, where)
            return [self._string(where) for _ in range(count)]
        if kind == _ARRAY and depth > 0:
            count = self._count("<Q", _MIN_ARRAY_BYTES, where)
            return [self._array(where, depth - 1) for _ in range(count)]
        raise self._error(f"is damaged: {where} is an array of value type {kind}")

    def _scalars(self, kind: int, count: int, where: str) -> NDArray[np.generic]:
        dtype = np.dtype(_SCALARS[kind])
        raw = self._take(count * dtype.itemsize, where)
        if kind == _BOOL:  # any byte but 0 is true; numpy wants exactly 0 or 1
            return np.frombuffer(raw, np.uint8).astype(np.bool_)
        return np.frombuffer(raw, dtype)

    def _string(self, where: str) -> str:
        raw = self._take(self._number("<Q", where), where)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self._error(f"is damaged: {where} is not UTF-8 text") from None

    def _count(self, layout: str, min_item_bytes: int, where: str) -> int:
        """A count, refused where the rest of the file could not hold that many items.

        Refused above a limit too: zeros read as empty texts, and a large file is full of them.
        """
        count = self._number(layout, where)
        if count > min(_MAX_ITEMS, (self._size - self._at) // min_item_bytes):
            raise self._error(f"is truncated or damaged: it claims {count} items of {where}")
        return count

    def _number(self, layout: str, where: str) -> int:
        (value,) = struct.unpack(layout, self._take(struct.calcsize(layout), where))
        return int(value)

    def _take(self, size: int, where: str) -> bytes:
        if size > self._size - self._at:
            raise self._error(f"is truncated or damaged: it ends within {where}; download it again")
        raw = self._data[self._at : self._at + size]
        self._at += size
        return raw

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path} {what}")
