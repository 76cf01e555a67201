"""The one import of ONNX Runtime, with its telemetry switched off.

Official builds report usage by default. The environment variable is read when the library is
loaded, so it is set before the first import, unless the host has set it already.
"""

from __future__ import annotations

import os
import threading
from types import ModuleType

from headrace.runtime.errors import BackendUnavailableError

_lock = threading.Lock()


def load_onnxruntime() -> ModuleType:
    """The `onnxruntime` module.

    Raises:
        BackendUnavailableError: it is not installed or does not load.
    """
    with _lock:
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        try:
            import onnxruntime
        except ImportError as error:
            raise BackendUnavailableError(
                f"onnxruntime cannot be imported ({error}); install headrace[cpu]"
            ) from None
        onnxruntime.disable_telemetry_events()
        return onnxruntime
