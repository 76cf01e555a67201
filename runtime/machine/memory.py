"""What this process holds of the machine's memory, and giving it back."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import psutil

_M_ARENA_MAX = -8  # of glibc's malloc.h


def trim_heap() -> None:
    """Return what was freed: glibc keeps it otherwise, 30 MB after reading a tokenizer.

    Does nothing on systems without `malloc_trim`.
    """
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def share_heap() -> None:
    """Have all threads allocate from one heap, of which `trim_heap` returns everything free.

    glibc gives threads heaps of their own and never returns the free end of those: 40 MB of a
    thread that runs steps. It is a matter of the whole process, so it is for programs to call,
    before they start threads. Does nothing on systems without `mallopt`.
    """
    set_option = _of_glibc("mallopt")
    if set_option is not None:
        set_option(_M_ARENA_MAX, 1)


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


def _of_glibc(name: str) -> Any:
    """A function that glibc has; None where another library, as musl, has none."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
