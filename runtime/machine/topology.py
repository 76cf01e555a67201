"""Names and flags of processors, and kinds of cores, from /proc and /sys."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# py-cpuinfo and the kernel spell some features differently.
_SPELLINGS = {
    "avx512vnni": "avx512_vnni",
    "avxvnni": "avx_vnni",
    "avx512bf16": "avx512_bf16",
    "amxint8": "amx_int8",
    "amxbf16": "amx_bf16",
    "asimddp": "dotprod",
}


@dataclass(frozen=True, slots=True)
class CpuName:
    """`vendor` as CPUID gives it ("GenuineIntel"), `brand` the model's name; empty if unknown."""

    vendor: str
    brand: str
    flags: frozenset[str]


@dataclass(frozen=True, slots=True)
class CoreCounts:
    """Hyper-threads of one core count once, except in `logical`.

    Attributes:
        logical: processors that are online.
        physical: cores that they belong to.
        performance: cores of the fastest kind.
        allowed_physical: cores behind the processors that this process may run on.
        allowed_performance: those of them that are of the fastest kind, or all if none is.
    """

    logical: int
    physical: int
    performance: int
    allowed_physical: int
    allowed_performance: int


def read_cpuinfo(root: Path = Path("/")) -> CpuName:
    """From /proc/cpuinfo; empty where there is none (Windows, macOS)."""
    try:
        return parse_cpuinfo((root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return CpuName("", "", frozenset())


def parse_cpuinfo(text: str) -> CpuName:
    """The first processor in the text of /proc/cpuinfo (x86 or Arm)."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, found, value = line.partition(":")
        if found:
            fields.setdefault(key.strip().lower(), value.strip())
    flags = fields.get("flags") or fields.get("features") or ""
    brand = fields.get("model name", "")
    return CpuName(fields.get("vendor_id", ""), brand, _normalized(flags.split()))


def ask_py_cpuinfo() -> CpuName:
    """What py-cpuinfo finds; empty where it finds nothing.

    It asks half a dozen programs and takes more than a second on Linux, so loading a model does
    without it wherever /proc/cpuinfo or executed instructions tell enough.
    """
    import cpuinfo

    try:
        fields = cpuinfo.get_cpu_info() or {}
    except Exception:  # what it raises, bare, for an architecture that it does not know
        fields = {}
    vendor, brand = str(fields.get("vendor_id_raw", "")), str(fields.get("brand_raw", ""))
    return CpuName(vendor, brand, _normalized(fields.get("flags") or []))


def count_cores(root: Path, allowed: Iterable[int]) -> CoreCounts | None:
    """Counts from /sys/devices/system/cpu; None where that does not exist.

    `allowed` are the processors that affinity leaves to this process.
    """
    online = _cpu_list(root / "sys/devices/system/cpu/online")
    if not online:
        return None
    siblings = {cpu: _siblings(root, cpu) for cpu in online}
    fast = _fast_cpus(root, online) or online
    allowed_here = online & frozenset(allowed) or online

    def cores(cpus: Iterable[int]) -> int:
        return len({siblings[cpu] for cpu in cpus})

    return CoreCounts(
        logical=len(online),
        physical=cores(online),
        performance=cores(fast),
        allowed_physical=cores(allowed_here),
        allowed_performance=cores(allowed_here & fast or allowed_here),
    )


def count_numa_nodes(root: Path = Path("/")) -> int:
    """Memory nodes that have processors; 1 where nothing is known."""
    nodes = (root / "sys/devices/system/node").glob("node[0-9]*/cpulist")
    return max(1, sum(1 for path in nodes if _cpu_list(path)))


def parse_cpu_list(text: str) -> frozenset[int]:
    """ "0-3,8" -> {0, 1, 2, 3, 8}; empty for what is no such list."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        if (match := re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part)) is None:
            return frozenset()
        first, last = match.groups()
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _fast_cpus(root: Path, online: frozenset[int]) -> frozenset[int]:
    """Processors of the fastest kind; empty where all are alike or nothing is known.

    Intel's hybrid processors list their performance cores in their own PMU folder; elsewhere
    (Arm) the cores with the highest maximum frequency count, if others have clearly less.
    """
    if hybrid := _cpu_list(root / "sys/devices/cpu_core/cpus"):
        return hybrid & online
    max_khz: dict[int, int] = {}
    for cpu in online:
        khz = _text(root / f"sys/devices/system/cpu/cpu{cpu}/cpufreq/cpuinfo_max_freq").strip()
        if re.fullmatch(r"[0-9]{1,12}", khz):
            max_khz[cpu] = int(khz)
    # Turbo bins of one kind differ by a few per cent, kinds of cores by a quarter and more.
    limit = 0.8 * max(max_khz.values(), default=0)
    fast = frozenset(cpu for cpu, khz in max_khz.items() if khz >= limit)
    return fast if len(fast) < len(max_khz) else frozenset()


def _siblings(root: Path, cpu: int) -> frozenset[int]:
    """The hyper-threads that share this processor's core, itself included."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    for name in ("core_cpus_list", "thread_siblings_list"):  # the second before Linux 5.3
        if found := _cpu_list(topology / name):
            return found | {cpu}
    return frozenset({cpu})


def _cpu_list(path: Path) -> frozenset[int]:
    return parse_cpu_list(_text(path))


def _text(path: Path) -> str:
    """The file's text, empty where it cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _normalized(flags: Iterable[str]) -> frozenset[str]:
    return frozenset(_SPELLINGS.get(flag.lower(), flag.lower()) for flag in flags)
