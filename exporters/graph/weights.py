"""Weights of a package: one external-data file that every graph of a target shares.

Tensors are written as they come, so exporting holds one tensor at a time. A second graph that asks
for a tensor already written gets a reference to the same bytes.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

# Large tensors start at a page boundary, so that the runtime can map them; small ones at a cache
# line.
_PAGE_BYTES = 4096
_LINE_BYTES = 64

Array = NDArray[np.generic]


class WeightStore:
    """Writes `folder/file_name` front to back and hands out external tensors into it."""

    def __init__(self, folder: Path, file_name: str) -> None:
        self.file_name = file_name
        self._folder = folder
        self._stream = (folder / file_name).open("wb")
        self._tensors: dict[str, ir.ExternalTensor] = {}
        self._described: dict[str, tuple[tuple[int, ...], str]] = {}
        self._placed: dict[tuple[str, bytes], ir.ExternalTensor] | None = None

    def for_each(self, count: int) -> list[WeightStore]:
        """Stores in the same file, for ranks: what several have under one name and with the same
        bytes is stored once."""
        self._placed = {}
        stores = [copy.copy(self) for _ in range(count)]
        for store in stores:
            store._tensors, store._described = {}, {}
        return stores

    def __enter__(self) -> WeightStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.close()

    def flush(self) -> None:
        """Let readers of the file see what was written so far."""
        self._stream.flush()

    @property
    def size_bytes(self) -> int:
        return self._stream.tell()

    @property
    def tensor_bytes(self) -> int:
        """Of all tensors that were asked for."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def describe(self, weight: str, shape: tuple[int, ...], format_name: str) -> None:
        """Say how a weight is stored; its tensors are `weight` and `weight.<part>`."""
        self._described[weight] = (shape, format_name)

    def described(self) -> list[tuple[str, str, tuple[int, ...], int]]:
        """Name, format, shape and bytes of every weight."""
        sizes: dict[str, int] = {}
        for name, tensor in self._tensors.items():
            owner = name if name in self._described else name.rpartition(".")[0]
            sizes[owner] = sizes.get(owner, 0) + tensor.nbytes
        return [(n, fmt, shape, sizes[n]) for n, (shape, fmt) in self._described.items()]

    def get(self, name: str, make: Callable[[], Array]) -> ir.ExternalTensor:
        """The tensor `name`, written from `make()` the first time it is asked for."""
        if name not in self._tensors:
            self._tensors[name] = self._place(name, make())
        return self._tensors[name]

    def _place(self, name: str, array: Array) -> ir.ExternalTensor:
        if self._placed is None:
            return self._write(name, array)
        array = np.ascontiguousarray(array)
        key = (name, hashlib.sha256(array.data).digest())
        if key not in self._placed:
            self._placed[key] = self._write(name, array)
        return self._placed[key]

    def _write(self, name: str, array: Array) -> ir.ExternalTensor:
        step = _PAGE_BYTES if array.nbytes >= _PAGE_BYTES else _LINE_BYTES
        self._stream.write(bytes(-self._stream.tell() % step))
        offset = self._stream.tell()
        self._stream.write(np.ascontiguousarray(array).data)
        return ir.ExternalTensor(
            self.file_name,
            offset,
            array.nbytes,
            ir.DataType.from_numpy(array.dtype),
            shape=ir.Shape(array.shape),
            name=name,
            base_dir=self._folder,
        )
