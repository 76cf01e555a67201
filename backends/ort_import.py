"""The one import of ONNX Runtime: what it reads from the environment is set before.

A value that the host has set already is never changed.
"""

from __future__ import annotations

import os
import threading
from types import ModuleType

from headrace.runtime.errors import BackendUnavailableError

_ENVIRONMENT = {
    # Official builds report usage unless told not to when the library is loaded.
    "ORT_DISABLE_TELEMETRY": "1",
    # Attention that materializes its scores beats the tiled kernel on the CPU: on SmolLM2-135M with
    # an INT8 cache, context 150, a step of 16 rows takes 0.71x, a prompt of 256 tokens 0.80x. It
    # also gives the same bits for any number of threads, which the tiled one does not.
    "ORT_GQA_DISABLE_FLASH_ATTENTION": "1",
}
_lock = threading.Lock()


def load_onnxruntime() -> ModuleType:
    """The `onnxruntime` module.

    Raises:
        BackendUnavailableError: it is not installed or does not load.
    """
    with _lock:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            import onnxruntime
        except ImportError as error:
            raise BackendUnavailableError(
                f"onnxruntime cannot be imported ({error}); install headrace[cpu]"
            ) from None
        onnxruntime.disable_telemetry_events()
        return onnxruntime
