"""Run Python code where opening a socket ends the process, told by the kernel and not by a hook.

    child = start_without_sockets("import headrace.runtime; ...", "argument", home=folder)
    assert child.wait(60) == 0        # CAUGHT: it tried to open a socket

The child installs a seccomp filter before anything else. Its threads and the processes it starts
have the filter too. io_uring can open sockets past the filter and x32 system calls have other
numbers, so both are fatal as well.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

# Exit status of a child that could not install the filter.
NO_SECCOMP = 77

CAUGHT = -signal.SIGSYS if hasattr(signal, "SIGSYS") else None

# (AUDIT_ARCH, socket, socketpair, connect, io_uring_setup, seccomp)
_NUMBERS = {
    "x86_64": (0xC000003E, 41, 53, 42, 425, 317),
    "aarch64": (0xC00000B7, 198, 199, 203, 425, 277),
}

_FILTER = """
def _no_sockets(arch, *numbers):
    import ctypes, struct, sys
    LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
    ALLOW, KILL_PROCESS = 0x7FFF0000, 0x80000000
    *fatal, seccomp = numbers
    program = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, arch), (RETURN, 0, 0, KILL_PROCESS)]
    program += [(LOAD, 0, 0, 0), (AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, KILL_PROCESS)]
    for number in fatal:
        program += [(EQUAL, 0, 1, number), (RETURN, 0, 0, KILL_PROCESS)]
    program += [(RETURN, 0, 0, ALLOW)]
    code = b"".join(struct.pack("=HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code)
    header = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    PR_SET_NO_NEW_PRIVS, SET_MODE_FILTER, TSYNC = 38, 1, 1
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.syscall(
        seccomp, SET_MODE_FILTER, TSYNC, ctypes.create_string_buffer(header)
    ):
        print("seccomp:", ctypes.get_errno(), file=sys.stderr)
        sys.exit({missing})
"""


@cache
def obstacle() -> str | None:
    """Why this cannot be done here."""
    if sys.platform != "linux" or platform.machine() not in _NUMBERS:
        return "needs the seccomp filters of Linux on x86-64 or arm64"
    probe = start_without_sockets("", home=Path("/nonexistent"))
    return "seccomp filters are not permitted here" if probe.wait(60) == NO_SECCOMP else None


def start_without_sockets(
    code: str, *words: object, home: Path, **environment: str | None
) -> subprocess.Popen[bytes]:
    """Start `code` with sys.argv[1:] = words and `home` as its home folder.

    Environment variables that are None are removed.
    """
    numbers = ", ".join(map(str, _NUMBERS[platform.machine()]))
    guarded = f"{_FILTER.replace('{missing}', str(NO_SECCOMP))}\n_no_sockets({numbers})\n{code}"
    changed = {"HOME": str(home), "XDG_CACHE_HOME": None, **environment}
    kept = {name: value for name, value in os.environ.items() if name not in changed}
    given = {name: value for name, value in changed.items() if value is not None}
    return subprocess.Popen(
        [sys.executable, "-c", guarded, *map(str, words)],
        env={**kept, **given},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
