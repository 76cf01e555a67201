"""What a thread has freed goes back to the system where the process says so beforehand."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

BYTES = 16 << 20
# Prints how much memory that no file holds a process has more after a thread has come and gone.
CHILD = f"""
import re, sys, threading
from pathlib import Path
from headrace.runtime.machine.memory import share_heap, trim_heap

def own_kib():
    kinds = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"Anonymous: +([0-9]+) kB", kinds)[1])

def take_and_free():
    bytes({BYTES * 3 // 2})  # from here on what is smaller comes from the heap
    b"x" * {BYTES}
    done.set()
    end.wait()

if sys.argv[1] == "share":
    share_heap()
done, end = threading.Event(), threading.Event()
before = own_kib()
thread = threading.Thread(target=take_and_free)
thread.start()
done.wait()
trim_heap()
print(own_kib() - before)
end.set()
"""


def left_bytes(how: str) -> int:
    command = [sys.executable, "-c", CHILD, how]
    return int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout) << 10


@pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc",
    reason="other heaps give back when they like",
)
def test_a_shared_heap_gives_back_what_threads_free() -> None:
    assert left_bytes("share") < BYTES // 8
    assert left_bytes("apart") > BYTES // 2  # else there is no need for it
