"""Execute an instruction before believing its flag.

A child process runs a few bytes of machine code for each feature and compares the result. A
processor, hypervisor or kernel that lists an instruction and then refuses it kills the child and
not the app; the features that the child did not come to are then tried in another one. So this
takes one child, and one more for each feature that is listed but does not work.

Where it cannot be done (`obstacle`) flags are believed, except those of AMX, which the system has
to enable for each process.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.runtime.child.process import is_interpreter

SKIP_VARIABLE = "HEADRACE_SKIP_PROBES"  # for apps that must not start processes

_TIMEOUT_S = 10.0

# The tile routine: ldtilecfg [code+0x80]; tilezero tmm0; tileloadd tmm1 and tmm2 from [code+0xc0];
# the product (its opcode is the second parameter, `5e` for tdpbusd, with the prefix in the first);
# tilestored [code+0x100],tmm0; tilerelease; mov eax,[code+0x100]; ret.
_TILE_CODE = (
    "4c8d05b900000041b940000000c4e27849056a000000c4e27b49c0c4827b4b0c08c4827b4b1408c4e2{}{}c1"
    "4c8d15cd000000c4827a4b040ac4e27849c08b05bc000000c3"
)
_TILE_CONFIG = (  # palette 1; three tiles of one row of four bytes
    "01" + "00" * 15 + "0400" * 3 + "00" * 26 + "010101" + "00" * 13
)


def _tile_routine(prefix: str, opcode: str, operand: str) -> str:
    code = _TILE_CODE.format(prefix, opcode)
    padding = "90" * (0x80 - len(code) // 2)
    return code + padding + _TILE_CONFIG + operand * 16 + "00" * 64


# Machine code by feature, and the value it leaves in EAX. Leaf functions that touch only registers
# which both the System V and the Windows convention leave to the callee.
#
#   avx2         vpcmpeqd ymm0,ymm0,ymm0; vpmovmskb eax,ymm0                        -> all ones
#   avx512f      vpternlogd zmm0,zmm0,zmm0,0xff; vmovd eax,xmm0                     -> all ones
#   avx_vnni     {vex} vpdpbusd ymm0,ymm1,ymm1 on bytes of 1; vmovd eax,xmm0        -> 4
#   avx512_vnni  vpdpbusd zmm0,zmm1,zmm1 on bytes of 1; vmovd eax,xmm0              -> 4
#   avx512_bf16  vdpbf16ps zmm0,zmm1,zmm1 on ones; vmovd eax,xmm0                   -> 2.0f
#   amx_int8     tdpbusd tmm0,tmm1,tmm2 on bytes of 1                               -> 4
#   amx_bf16     tdpbf16ps tmm0,tmm1,tmm2 on ones                                   -> 2.0f
_CODE = {
    "avx2": ("c5fd76c0c5fdd7c0c5f877c3", 0xFFFFFFFF),
    "avx512f": ("62f37d4825c0ffc5f97ec0c5f877c3", 0xFFFFFFFF),
    "avx_vnni": ("b801010101c5f96ec8c4e27d58c9c5fdefc0c4e27550c1c5f97ec0c5f877c3", 4),
    "avx512_vnni": ("b80101010162f27d487cc862f17d48efc062f2754850c1c5f97ec0c5f877c3", 4),
    "avx512_bf16": ("b8803f803f62f27d487cc862f17d48efc062f2764852c1c5f97ec0c5f877c3", 0x40000000),
    "amx_int8": (_tile_routine("69", "5e", "01010101"), 4),
    "amx_bf16": (_tile_routine("6a", "5c", "803f803f"), 0x40000000),
}
PROBED = tuple(_CODE)

# Runs in the child. argv: feature, code, expected, feature, code, ... It writes a feature's name
# before the attempt and the outcome after it: 1 works, 0 wrong result or not permitted, - cannot be
# tried. No core dump or crash dialog for a refused instruction.
_CHILD = """
import ctypes, mmap, sys
out = sys.stdout
def page_of(code):
    if sys.platform == "win32":
        kernel = ctypes.WinDLL("kernel32")
        kernel.SetErrorMode(3)
        kernel.VirtualAlloc.restype = ctypes.c_void_p
        address = kernel.VirtualAlloc(None, ctypes.c_size_t(4096), 0x3000, 0x40)
        if not address:
            raise OSError
        ctypes.memmove(address, code, len(code))
        return None, address
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    return page, ctypes.addressof(ctypes.c_char.from_buffer(page))
def outcome(name, code, expected):
    try:
        page, address = page_of(bytes.fromhex(code))
    except OSError:
        return "-"
    if name.startswith("amx") and sys.platform == "linux":
        ARCH_REQ_XCOMP_PERM, TILE_DATA = 0x1023, 18
        if ctypes.CDLL(None).syscall(158, ARCH_REQ_XCOMP_PERM, TILE_DATA) != 0:
            return "0"
    return "1" if ctypes.CFUNCTYPE(ctypes.c_uint32)(address)() == int(expected) else "0"
if sys.platform == "linux":
    PR_SET_DUMPABLE = 4
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)
for name, code, expected in zip(*[iter(sys.argv[1:])] * 3):
    out.write(name + " ")
    out.flush()
    out.write(outcome(name, code, expected) + "\\n")
    out.flush()
"""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """`works` is None where the instruction could not be tried."""

    feature: str
    works: bool | None


def is_x86_64(machine: str) -> bool:
    return machine.lower() in ("x86_64", "amd64")


def obstacle() -> str | None:
    """Why no instruction can be tried here; None if nothing is known to be in the way."""
    if not is_x86_64(platform.machine()):
        return f"there are no probes for {platform.machine()}"
    if os.environ.get(SKIP_VARIABLE, "0") not in ("", "0"):
        return f"{SKIP_VARIABLE} is set"
    # Starting the app a second time instead of an interpreter would do who knows what.
    if not is_interpreter():
        return "this process is no plain Python interpreter that could be started again"
    return None


def probe(features: Iterable[str]) -> tuple[ProbeResult, ...]:
    """Execute each of `features` that there is a probe for, in the order of `PROBED`."""
    listed = frozenset(features)
    wanted = [name for name in PROBED if name in listed]
    works: dict[str, bool | None] = {}
    if obstacle() is not None:
        works = dict.fromkeys(wanted)
    while left := [name for name in wanted if name not in works]:
        works |= _outcomes(*_run_child(left), left)
    return tuple(ProbeResult(name, works[name]) for name in wanted)


def believed(flags: frozenset[str], results: Sequence[ProbeResult]) -> frozenset[str]:
    """What works, and of the other `flags` all but those that failed and untried AMX."""
    failed = {
        result.feature
        for result in results
        if result.works is False or (result.works is None and result.feature.startswith("amx"))
    }
    return (flags | {result.feature for result in results if result.works}) - failed


def _run_child(features: Sequence[str]) -> tuple[str, bool]:
    """What a child wrote about `features`, and whether it came to an end by itself."""
    code = [str(word) for name in features for word in (name, *_CODE[name])]
    try:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CHILD, *code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
    except OSError:
        return "", False
    with child:
        try:
            written, _ = child.communicate(timeout=_TIMEOUT_S)
            ended = True
        except subprocess.TimeoutExpired:
            child.kill()
            written, _ = child.communicate()
            ended = False
    return written.decode("ascii", "replace"), ended


def _outcomes(written: str, ended: bool, features: Sequence[str]) -> dict[str, bool | None]:
    """Outcomes of the features that a child came to; of all of them if it came to none.

    An attempt without an outcome killed the child, unless the child had to be stopped.
    """
    found: dict[str, bool | None] = {}
    for line in written.splitlines():
        name, _, outcome = line.partition(" ")
        if name in features:
            found[name] = {"1": True, "0": False, "": False}.get(outcome)
    last = next(reversed(found), None)
    if last is not None and not ended and not written.endswith("\n"):
        found[last] = None
    return found or dict.fromkeys(features)
