"""`CudaDevice` against a CUDA runtime library that works on memory of the host: what it calls, with
which arguments, and who frees what. Whether a card does the same, only a card can say."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import numpy as np
import pytest

from headrace.backends.cuda import device
from headrace.backends.cuda.device import CudaDevice
from headrace.runtime.errors import BackendError, BackendUnavailableError

TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3


class HostRuntime:
    """Functions of the library by name; `fail` is returned by all of them."""

    def __init__(self) -> None:
        self.memory: dict[int, Any] = {}
        self.kinds: list[int] = []
        self.fail = 0

    def cudaMemGetInfo(self, free: Any, total: Any) -> int:  # noqa: N802
        free._obj.value, total._obj.value = 3 << 30, 4 << 30
        return self.fail

    def cudaMalloc(self, pointer: Any, size: Any) -> int:  # noqa: N802
        if self.fail:
            return self.fail
        memory = ctypes.create_string_buffer(b"\xff" * size.value, size.value)
        pointer._obj.value = ctypes.addressof(memory)
        self.memory[ctypes.addressof(memory)] = memory
        return 0

    def cudaHostAlloc(self, pointer: Any, size: Any, flags: Any) -> int:  # noqa: N802
        assert flags.value == 0
        return self.cudaMalloc(pointer, size)

    def cudaMemset(self, pointer: Any, value: Any, size: Any) -> int:  # noqa: N802
        ctypes.memset(pointer, value.value, size.value)
        return self.fail

    def cudaMemcpy(self, target: Any, source: Any, size: Any, kind: Any) -> int:  # noqa: N802
        self.kinds.append(kind.value)
        ctypes.memmove(target, source, size.value)
        return self.fail

    def cudaDeviceSynchronize(self) -> int:  # noqa: N802
        return self.fail

    def cudaFree(self, pointer: Any) -> int:  # noqa: N802
        del self.memory[pointer.value]
        return self.fail

    cudaFreeHost = cudaFree  # noqa: N815


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> HostRuntime:
    made = HostRuntime()
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: made)
    return made


def test_memory(runtime: HostRuntime) -> None:
    card = CudaDevice()
    assert card.free_bytes() == 3 << 30
    address = card.allocate(16)
    assert card.read(address, 16) == bytes(16)
    card.write(address + 2, b"\0abc")
    card.copy(address + 3, address + 9, 3)
    assert card.read(address, 16) == b"\0\0\0abc\0\0\0abc\0\0\0\0"
    assert runtime.kinds == [TO_HOST, TO_DEVICE, ON_DEVICE, TO_HOST]
    card.release(address)
    assert not runtime.memory


def test_an_array_of_the_host_stays_as_long_as_a_view_of_it(runtime: HostRuntime) -> None:
    view = CudaDevice().host_array(400).view(np.float32).reshape(10, 10)[:3]
    gc.collect()
    view[...] = 1
    assert len(runtime.memory) == 1
    del view
    gc.collect()
    assert not runtime.memory


@pytest.mark.parametrize(
    ("code", "said"), [(2, "cudaMalloc: out of device memory"), (700, "cudaMalloc: CUDA error 700")]
)
def test_errors(runtime: HostRuntime, code: int, said: str) -> None:
    runtime.fail = code
    with pytest.raises(BackendError, match=said):
        CudaDevice().allocate(4)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise OSError("not found")

    monkeypatch.setattr(device.ctypes, "CDLL", load)
    with pytest.raises(BackendUnavailableError, match=r"cudart.*headrace\[cuda\]"):
        CudaDevice()
