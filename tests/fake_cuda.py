"""A CUDA device that is not one: host memory by address, and a session that runs graphs in numpy.

backend = make_backend(package, max_sequences=4, block_tokens=4)
"""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from contrib_ops import evaluator
from numpy.typing import NDArray

from headrace.backends.cuda.backend import Connection, CudaBackend
from headrace.runtime.config import EngineConfig
from headrace.runtime.errors import BackendError
from headrace.runtime.machine.hardware import probe_hardware
from headrace.runtime.manifest import Manifest, read_manifest

Array = NDArray[Any]


class HostDevice:
    """Memory of this process; what was not allocated may not be touched."""

    name = "cpu"

    def __init__(self, free_bytes: int = 1 << 24) -> None:
        self.allocated: dict[int, Array] = {}
        self.num_copies = 0
        self._free_bytes = free_bytes

    def free_bytes(self) -> int:
        return self._free_bytes

    def allocate(self, num_bytes: int) -> int:
        if num_bytes > self._free_bytes:
            raise BackendError("out of device memory")
        # A card's memory is zeros at first; these would show if anybody read them.
        memory = np.full(num_bytes // 2, 60000, np.float16)
        self.allocated[memory.ctypes.data] = memory
        return int(memory.ctypes.data)

    def release(self, address: int) -> None:
        del self.allocated[address]

    def host_array(self, num_bytes: int) -> NDArray[np.uint8]:
        return np.empty(num_bytes, np.uint8)

    def copy(self, source: int, target: int, num_bytes: int) -> None:
        self.num_copies += 1
        self._check(source, num_bytes)
        self._check(target, num_bytes)
        ctypes.memmove(target, source, num_bytes)

    def read(self, address: int, num_bytes: int) -> bytes:
        self._check(address, num_bytes)
        return ctypes.string_at(address, num_bytes)

    def write(self, address: int, data: bytes) -> None:
        self._check(address, len(data))
        ctypes.memmove(address, data, len(data))

    def _check(self, address: int, num_bytes: int) -> None:
        assert any(
            start <= address and address + num_bytes <= start + memory.nbytes
            for start, memory in self.allocated.items()
        )


class NumpySession:
    """What the backend uses of an `InferenceSession`."""

    def __init__(self, graph: Path) -> None:
        self._evaluator = evaluator(graph)

    def io_binding(self) -> NumpyBinding:
        return NumpyBinding()

    def run_with_iobinding(self, binding: NumpyBinding) -> None:
        names = list(binding.outputs)
        results = self._evaluator.run(names, binding.inputs)
        for name, result in zip(names, results, strict=True):
            bound = binding.outputs[name]
            assert bound.shape == result.shape and bound.dtype == result.dtype
            if bound.ctypes.data != result.ctypes.data:
                bound[...] = result


class NumpyBinding:
    def __init__(self) -> None:
        self.inputs: dict[str, Array] = {}
        self.outputs: dict[str, Array] = {}

    def bind_input(self, name: str, *place: Any) -> None:
        self.inputs[name] = _at(*place)

    def bind_output(self, name: str, *place: Any) -> None:
        self.outputs[name] = _at(*place)

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        self.inputs[name] = value.numpy()

    def bind_ortvalue_output(self, name: str, value: Any) -> None:
        self.outputs[name] = value.numpy()


def _at(device: str, number: int, dtype: Any, shape: tuple[int, ...], address: int) -> Array:
    assert (device, number) == ("cpu", 0)
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = (ctypes.c_char * size).from_address(address)
    return np.frombuffer(memory, dtype).reshape(shape)


def with_block_tokens(manifest: Manifest, block_tokens: int) -> Manifest:
    """Blocks so small that short texts have several; graphs take any size."""
    targets = tuple(
        dataclasses.replace(t, kv_cache=dataclasses.replace(t.kv_cache, block_tokens=block_tokens))
        if t.device == "cuda"
        else t
        for t in manifest.targets
    )
    return dataclasses.replace(manifest, targets=targets)


def make_backend(
    package: Path, *, block_tokens: int = 4, free_bytes: int = 1 << 24, **options: Any
) -> SimpleNamespace:
    """`backend`, not loaded yet, and the `device` that it will use."""
    device = HostDevice(free_bytes)
    manifest = with_block_tokens(read_manifest(package), block_tokens)
    backend = CudaBackend(
        package,
        manifest,
        EngineConfig(**options),
        probe_hardware(),
        connect=lambda graph: Connection(NumpySession(graph), device),
    )
    return SimpleNamespace(backend=backend, device=device)
