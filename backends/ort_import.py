"""The one import of ONNX Runtime, with its telemetry switched off.

Official builds report usage by default. Seen with strace on the Linux wheel of 1.32: importing it
writes a device id and an event store under ~/.cache/Microsoft, and about nine seconds later a
thread looks up mobile.events.data.microsoft.com. `disable_telemetry_events()` after the import does
*not* prevent that; the environment variable, which is read while the library is loaded, does: no
socket, no file. So it is set before the first import, unless the host has set it already.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from types import ModuleType

from headrace.runtime.errors import BackendUnavailableError

logger = logging.getLogger(__name__)

TELEMETRY_VARIABLE = "ORT_DISABLE_TELEMETRY"

_lock = threading.Lock()


def load_onnxruntime() -> ModuleType:
    """The `onnxruntime` module.

    Raises:
        BackendUnavailableError: it is not installed or does not load.
    """
    with _lock:
        if TELEMETRY_VARIABLE not in os.environ:
            if "onnxruntime" in sys.modules:
                logger.warning(
                    "onnxruntime was imported before headrace and may send telemetry; "
                    "set %s=1 before that import",
                    TELEMETRY_VARIABLE,
                )
            os.environ[TELEMETRY_VARIABLE] = "1"
        try:
            import onnxruntime
        except ImportError as error:
            raise BackendUnavailableError(
                f"onnxruntime cannot be imported ({error}); pip install headrace[cpu]"
            ) from None
        if not hasattr(onnxruntime, "InferenceSession"):
            # onnxruntime and onnxruntime-gpu share a folder: removing one breaks the other.
            raise BackendUnavailableError(
                "the installed onnxruntime is incomplete; pip install --force-reinstall "
                "headrace[cpu] (or headrace[cuda], not both)"
            )
        onnxruntime.disable_telemetry_events()
        module: ModuleType = onnxruntime
        return module
