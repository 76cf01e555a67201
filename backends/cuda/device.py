"""Memory of a CUDA device: what ONNX Runtime's Python interface does not offer.

An OrtValue can be read and written as a whole only, and the arena behind it rounds sizes up. The
cache is one block of memory that parts are read of and copied within, so these calls go to the CUDA
runtime library, which the provider has loaded by then. They are finished when they return; so is a
session's run.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.runtime.errors import BackendError, BackendUnavailableError

_TO_DEVICE, _TO_HOST, _ON_DEVICE = 1, 2, 3  # cudaMemcpyKind
_OUT_OF_MEMORY = 2


class Device(Protocol):
    """Memory by address. `name` is what ONNX Runtime calls the kind of device."""

    @property
    def name(self) -> str: ...

    def free_bytes(self) -> int: ...

    def allocate(self, num_bytes: int) -> int:
        """The address of zeros.

        Raises:
            BackendError: there is not so much.
        """
        ...

    def release(self, address: int) -> None: ...

    def host_array(self, num_bytes: int) -> NDArray[np.uint8]:
        """Memory of the host that the device copies to at full speed."""
        ...

    def copy(self, source: int, target: int, num_bytes: int) -> None: ...

    def read(self, address: int, num_bytes: int) -> bytes: ...

    def write(self, address: int, data: bytes) -> None: ...


class CudaDevice:
    """The first visible device. Never executed without a card."""

    name = "cuda"

    def __init__(self) -> None:
        """Raises BackendUnavailableError: the CUDA runtime library is not there."""
        library = "cudart64_13.dll" if sys.platform == "win32" else "libcudart.so.13"
        try:
            self._cuda = ctypes.CDLL(library)
        except OSError as error:
            raise BackendUnavailableError(
                f'{library} cannot be loaded ({error}); pip install "headrace[cuda]"'
            ) from None

    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def allocate(self, num_bytes: int) -> int:
        address = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        self._call("cudaMemset", address, ctypes.c_int(0), ctypes.c_size_t(num_bytes))
        self._call("cudaDeviceSynchronize")
        assert address.value is not None
        return address.value

    def release(self, address: int) -> None:
        self._call("cudaFree", ctypes.c_void_p(address))

    def host_array(self, num_bytes: int) -> NDArray[np.uint8]:
        address = ctypes.c_void_p()
        size = ctypes.c_size_t(num_bytes)
        self._call("cudaHostAlloc", ctypes.byref(address), size, ctypes.c_uint(0))
        assert address.value is not None
        memory = (ctypes.c_uint8 * num_bytes).from_address(address.value)
        # Whoever has a view of it keeps it: it goes back with the last one.
        weakref.finalize(memory, self._cuda.cudaFreeHost, ctypes.c_void_p(address.value))
        return np.ctypeslib.as_array(memory)

    def copy(self, source: int, target: int, num_bytes: int) -> None:
        self._copy(target, source, num_bytes, _ON_DEVICE)

    def read(self, address: int, num_bytes: int) -> bytes:
        buffer = ctypes.create_string_buffer(num_bytes)
        self._copy(ctypes.addressof(buffer), address, num_bytes, _TO_HOST)
        return buffer.raw

    def write(self, address: int, data: bytes) -> None:
        buffer = ctypes.create_string_buffer(data, len(data))
        self._copy(address, ctypes.addressof(buffer), len(data), _TO_DEVICE)

    def _copy(self, target: int, source: int, num_bytes: int, kind: int) -> None:
        self._call(
            "cudaMemcpy",
            ctypes.c_void_p(target),
            ctypes.c_void_p(source),
            ctypes.c_size_t(num_bytes),
            ctypes.c_int(kind),
        )
        # Copies on the device return before they are done, and a session has a stream of its own.
        self._call("cudaDeviceSynchronize")

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._cuda, name)(*args)
        if code:
            reason = "out of device memory" if code == _OUT_OF_MEMORY else f"CUDA error {code}"
            raise BackendError(f"{name}: {reason}")
