"""Execute an instruction before believing its flag.

Each listed feature gets a child process that runs a few bytes of machine code and compares the
result: a processor, hypervisor or kernel that lists an instruction and then refuses it kills the
child and not the app. Children run side by side, about 50 ms in all.

Where this cannot be done (a frozen app whose executable is the app itself, no executable memory,
another architecture) flags are believed, except those of AMX, which the system has to enable.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from dataclasses import dataclass

_TIMEOUT_S = 10.0

# Machine code by feature, and the value it leaves in EAX. Leaf functions that touch only registers
# which both the System V and the Windows convention leave to the callee.
#
#   avx2         vpcmpeqd ymm0,ymm0,ymm0; vpmovmskb eax,ymm0                        -> all ones
#   avx512f      vpternlogd zmm0,zmm0,zmm0,0xff; vmovd eax,xmm0                     -> all ones
#   avx_vnni     {vex} vpdpbusd ymm0,ymm1,ymm1 on bytes of 1; vmovd eax,xmm0        -> 4
#   avx512_vnni  vpdpbusd zmm0,zmm1,zmm1 on bytes of 1; vmovd eax,xmm0              -> 4
#   avx512_bf16  vdpbf16ps zmm0,zmm1,zmm1 on ones; vmovd eax,xmm0                   -> 2.0f
#   amx_int8     ldtilecfg; tileloadd; tdpbusd tmm0,tmm1,tmm2 on bytes of 1; tilestored -> 4
_AMX_CODE = (
    "4c8d05b900000041b940000000c4e27849056a000000c4e27b49c0c4827b4b0c08c4827b4b1408c4e2695ec1"
    "4c8d15cd000000c4827a4b040ac4e27849c08b05bc000000c3"
)
_AMX_DATA = (
    "01"
    + "00" * 15
    + "0400" * 3
    + "00" * 26
    + "010101"
    + "00" * 13  # palette, columns, rows
    + "01" * 64  # one row of ones; padding of the tile
    + "00" * 64
)
_CODE = {
    "avx2": ("c5fd76c0c5fdd7c0c5f877c3", 0xFFFFFFFF),
    "avx512f": ("62f37d4825c0ffc5f97ec0c5f877c3", 0xFFFFFFFF),
    "avx_vnni": ("b801010101c5f96ec8c4e27d58c9c5fdefc0c4e27550c1c5f97ec0c5f877c3", 4),
    "avx512_vnni": ("b80101010162f27d487cc862f17d48efc062f2754850c1c5f97ec0c5f877c3", 4),
    "avx512_bf16": ("b8803f803f62f27d487cc862f17d48efc062f2764852c1c5f97ec0c5f877c3", 0x40000000),
    "amx_int8": (_AMX_CODE + "90" * (128 - len(_AMX_CODE) // 2) + _AMX_DATA, 4),
}
PROBED = tuple(_CODE)

# Runs in the child: argv = code, expected, 1 if tile state must be asked for. Exit 0: it works;
# 3: there is no executable memory here.
_CHILD = """
import ctypes, mmap, sys
code, expected, tiles = bytes.fromhex(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1"
try:
    if sys.platform == "win32":
        kernel = ctypes.WinDLL("kernel32")
        kernel.VirtualAlloc.restype = ctypes.c_void_p
        address = kernel.VirtualAlloc(None, ctypes.c_size_t(4096), 0x3000, 0x40)
        if not address:
            sys.exit(3)
        ctypes.memmove(address, code, len(code))
    else:
        page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(code)
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
except OSError:
    sys.exit(3)
if tiles and sys.platform == "linux":
    ARCH_REQ_XCOMP_PERM, TILE_DATA = 0x1023, 18
    if ctypes.CDLL(None).syscall(158, ARCH_REQ_XCOMP_PERM, TILE_DATA) != 0:
        sys.exit(1)
sys.exit(0 if ctypes.CFUNCTYPE(ctypes.c_uint32)(address)() == expected else 1)
"""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """`works` is None where the instruction could not be tried."""

    feature: str
    works: bool | None


def probe_all(features: frozenset[str]) -> tuple[ProbeResult, ...]:
    """Execute each of `features` that there is a probe for."""
    wanted = [name for name in PROBED if name in features]
    if getattr(sys, "frozen", False) or platform.machine().lower() not in ("x86_64", "amd64"):
        return tuple(ProbeResult(name, None) for name in wanted)
    children = [(name, _start(name)) for name in wanted]
    return tuple(ProbeResult(name, _outcome(child)) for name, child in children)


def believed(flags: frozenset[str]) -> frozenset[str]:
    """`flags` without those whose instruction failed, and without untried AMX."""
    return flags - {
        result.feature
        for result in probe_all(flags)
        if result.works is False or (result.works is None and result.feature.startswith("amx"))
    }


def _start(feature: str) -> subprocess.Popen[bytes] | None:
    code, expected = _CODE[feature]
    tiles = "1" if feature.startswith("amx") else "0"
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CHILD, code, str(expected), tiles],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return None


def _outcome(child: subprocess.Popen[bytes] | None) -> bool | None:
    if child is None:
        return None
    try:
        status = child.wait(_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return None
    return None if status == 3 else status == 0
