"""What is said where CUDA cannot be used, without a card."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import onnxruntime
import pytest

from headrace.backends.cuda import provider
from headrace.backends.cuda.backend import connect_cuda
from headrace.runtime.errors import BackendUnavailableError


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            "libcublasLt.so.13: cannot open shared object file: No such file or directory",
            'the library libcublasLt.so.13 is missing; pip install "headrace[cuda]"',
        ),
        (
            "/x/libonnxruntime_providers_cuda.so: undefined symbol: cudaFoo\nmore",
            "its provider does not load (/x/libonnxruntime_providers_cuda.so: undefined symbol: "
            'cudaFoo); pip install "headrace[cuda]"',
        ),
    ],
)
def test_errors_of_the_loader(message: str, said: str) -> None:
    assert provider.missing_library(message) == said


@pytest.mark.skipif(
    provider.PROVIDER in onnxruntime.get_available_providers(), reason="this build has CUDA"
)
def test_a_build_without_cuda_is_named(tmp_path: Path) -> None:
    reason = provider.obstacle()
    assert reason is not None and "built without CUDA" in reason and "headrace[cuda]" in reason
    with pytest.raises(BackendUnavailableError, match="built without CUDA"):
        connect_cuda(tmp_path / "paged.onnx")


def driver(count: int, code: int = 0) -> object:
    def device_count(pointer: object) -> int:
        pointer._obj.value = count
        return 0

    return SimpleNamespace(cuInit=lambda _: code, cuDeviceGetCount=device_count)


@pytest.mark.parametrize(
    ("loads", "said"),
    [
        (OSError("no"), "no NVIDIA driver is installed"),
        (driver(1, code=999), "does not start (CUDA error 999)"),
        (driver(0), "no CUDA device is visible: CUDA_VISIBLE_DEVICES='7'"),
        (driver(1), None),
    ],
)
def test_the_driver_is_asked_first(
    loads: object, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(_: str) -> object:
        if isinstance(loads, OSError):
            raise loads
        return loads

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setattr(provider.ctypes, "CDLL", load)
    reason = provider._driver_obstacle()
    assert (reason is None) == (said is None)
    assert (said or "") in (reason or "")
