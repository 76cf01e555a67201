"""Whether ONNX Runtime can use a CUDA device here, and if not, what is missing.

ONNX Runtime itself falls back to the CPU without an error: a provider is listed as available before
any of its libraries has been looked for. So the driver, the device and the provider's library are
loaded one after the other, and the first that fails is named.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import re
import sys
from pathlib import Path
from typing import Any

from headrace.backends.ort_import import load_onnxruntime
from headrace.backends.ort_session import map_ort_errors, set_threads
from headrace.runtime.errors import BackendUnavailableError, HeadraceError

PROVIDER = "CUDAExecutionProvider"
_INSTALL = 'pip install "headrace[cuda]"'


def obstacle() -> str | None:
    """What keeps CUDA from being used, as one line that says what to do; None if nothing does."""
    try:
        ort = load_onnxruntime()
    except HeadraceError as error:
        return str(error)
    if PROVIDER not in ort.get_available_providers():
        return (
            f"the installed onnxruntime {ort.__version__} is built without CUDA; "
            f"pip uninstall onnxruntime, then {_INSTALL}"
        )
    return _driver_obstacle() or _library_obstacle(ort)


def cuda_session(graph: Path) -> Any:
    """An `InferenceSession` on the first visible device.

    Raises:
        BackendUnavailableError: the provider did not load.
        PackageError: the graph cannot be read.
    """
    if (reason := obstacle()) is not None:
        raise BackendUnavailableError(f"CUDA cannot be used: {reason}")
    ort = load_onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    set_threads(options, 0)  # as many as ONNX Runtime likes
    # TF32 is for what is float32 in the graph; the arena takes what is asked for and no more, since
    # the KV pool gets the rest.
    provider = {"device_id": 0, "use_tf32": 1, "arena_extend_strategy": "kSameAsRequested"}
    with map_ort_errors(f"loading {graph}"):
        session = ort.InferenceSession(str(graph), options, providers=[(PROVIDER, provider)])
    if PROVIDER not in session.get_providers():
        raise BackendUnavailableError(
            "CUDA cannot be used: ONNX Runtime chose "
            f"{', '.join(session.get_providers())} without saying why"
        )
    return session


def _driver_obstacle() -> str | None:
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(name)
    except OSError:
        return f"no NVIDIA driver is installed ({name} is missing); install one for your card"
    count = ctypes.c_int(0)
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code:
        return f"the NVIDIA driver does not start (CUDA error {code}); check that nvidia-smi works"
    if not count.value:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "" if visible is None else f": CUDA_VISIBLE_DEVICES={visible!r}"
        return f"no CUDA device is visible{why}"
    return None


def _library_obstacle(ort: Any) -> str | None:
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it cannot find
        ort.preload_dlls()
    folder = Path(ort.__file__).parent / "capi"
    pattern = "{}.dll" if sys.platform == "win32" else "lib{}.so"
    try:
        for name in ("onnxruntime_providers_shared", "onnxruntime_providers_cuda"):
            ctypes.CDLL(str(folder / pattern.format(name)), ctypes.RTLD_GLOBAL)
    except OSError as error:
        return missing_library(str(error))
    return None


def missing_library(message: str) -> str:
    """What to do about an error of the dynamic loader."""
    found = re.match(r"(lib[^:/\s]+\.so[^:\s]*): cannot open shared object file", message)
    if found is None:
        return f"its provider does not load ({message.splitlines()[0]}); {_INSTALL}"
    return f"the library {found[1]} is missing; {_INSTALL}"
