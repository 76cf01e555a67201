"""What this process holds of the machine's memory, and giving it back."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import psutil


def trim_heap() -> None:
    """Return what was freed: glibc keeps it otherwise, 30 MB after reading a tokenizer.

    Does nothing on systems without `malloc_trim`.
    """
    if not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not
    if trim is not None:
        trim(0)


def peak_rss_bytes() -> int:
    """The most memory that this process has had resident, in bytes.

    Linux tells it for this program alone; `getrusage` would include the one that started it.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    info = psutil.Process().memory_info()
    if hasattr(info, "peak_wset"):
        return int(info.peak_wset)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
