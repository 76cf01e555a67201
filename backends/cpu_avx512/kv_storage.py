"""KV cache in row slots, in address space that the system fills with pages as they are touched.

One mapping holds `[layers, 2, slots, kv_heads, capacity, row_elements]`; keys at index 0, values at
1. For any contiguous range of slots each (layer, key or value) is a contiguous array, which ONNX
Runtime binds without copying and updates in place.

Memory follows use: a page comes into being when its first token is written, and goes back when its
slot is released. (numpy's own allocations ask for huge pages, which commits 2 MiB at a touch.) On
Windows the mapping counts against the commit limit from the start, pages still appear only when
touched, and a released slot keeps its pages for the next owner.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from headrace.backends.ort_import import load_onnxruntime
from headrace.runtime.errors import InsufficientMemoryError

_TOKENS_ALIGNED = 64  # keeps every head of a slot at a page boundary for the usual head sizes


class KvStorage:
    """Slots of `capacity` tokens each.

    Args:
        capacity_tokens: room in a slot, rounded up to a multiple of 64.
        row_elements: of a head and token; `head_dim`, or half of it where two values share a byte.
        dtype: of an element.

    Raises:
        InsufficientMemoryError: the system refuses the address space.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        row_elements: int,
        capacity_tokens: int,
        num_slots: int,
        dtype: np.dtype[Any],
    ) -> None:
        self.capacity_tokens = -(-capacity_tokens // _TOKENS_ALIGNED) * _TOKENS_ALIGNED
        self.num_slots = num_slots
        shape = (num_layers, 2, num_slots, num_kv_heads, self.capacity_tokens, row_elements)
        size_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self._map = _reserve(size_bytes)
        self._cache = np.frombuffer(self._map, dtype=dtype).reshape(shape)
        self._bound: dict[tuple[int, int], list[Any]] = {}

    def bind_range(self, first: int, last: int) -> list[Any]:
        """OrtValues of slots [first, last): key and value of layer 0, of layer 1, ..."""
        key = (first, last)
        if key not in self._bound:
            make = load_onnxruntime().OrtValue.ortvalue_from_numpy
            self._bound[key] = [
                make(self._cache[layer, part, first:last])
                for layer in range(self._cache.shape[0])
                for part in range(2)
            ]
        return self._bound[key]

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` positions of a slot to another."""
        self._cache[:, :, target, :, :num_tokens] = self._cache[:, :, source, :, :num_tokens]

    def read(self, slot: int, num_tokens: int) -> bytes:
        """The first positions of a slot, `[layers, 2, kv_heads, num_tokens, row_elements]`."""
        return self._cache[:, :, slot, :, :num_tokens].tobytes()

    def write(self, slot: int, num_tokens: int, data: bytes) -> None:
        """Fill the first positions of a slot with what `read` gave."""
        target = self._cache[:, :, slot, :, :num_tokens]
        target[...] = np.frombuffer(data, self._cache.dtype).reshape(target.shape)

    def release(self, slot: int) -> None:
        """Give the slot's pages back; its content is lost."""
        advice = getattr(mmap, "MADV_DONTNEED", None)
        if advice is None:
            return
        page = mmap.PAGESIZE
        base = self._cache.ctypes.data
        for layer in self._cache:
            for part in layer:
                start = part[slot].ctypes.data - base
                first = -(-start // page) * page
                length = (start + part[slot].nbytes - first) // page * page
                if length > 0:
                    self._map.madvise(advice, first, length)

    def unbind(self) -> None:
        """Forget what `bind_range` made; the mapping stays as long as anybody has it bound."""
        self._bound.clear()


def _reserve(size_bytes: int) -> mmap.mmap:
    try:
        if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
            return mmap.mmap(-1, size_bytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        mapping = mmap.mmap(-1, size_bytes, flags=flags)
    except (OSError, ValueError, OverflowError):
        raise InsufficientMemoryError(
            size_bytes, 0, "lower max_sequences or context_tokens"
        ) from None
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return mapping
