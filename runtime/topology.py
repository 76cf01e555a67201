"""Names, flags and kinds of cores."""

from __future__ import annotations

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


def cpu_name_and_flags(root: Path = Path("/")) -> tuple[str, frozenset[str]]:
    """Brand string and listed instruction sets.

    On Linux /proc/cpuinfo is read directly: py-cpuinfo asks half a dozen programs as well and
    takes a second, which loading a model should not.
    """
    try:
        name, flags = parse_cpuinfo((root / "proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        name, flags = "", frozenset()
    if flags:
        return name, flags
    import cpuinfo

    info = cpuinfo.get_cpu_info()
    return str(info.get("brand_raw", "")), _normalized(info.get("flags", []))


def parse_cpuinfo(text: str) -> tuple[str, frozenset[str]]:
    """Brand string and flags of the first processor in /proc/cpuinfo (x86 or Arm)."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, found, value = line.partition(":")
        if found:
            fields.setdefault(key.strip().lower(), value.strip())
    flags = fields.get("flags") or fields.get("features") or ""
    return fields.get("model name", ""), _normalized(flags.split())


def performance_cores(root: Path = Path("/")) -> int | None:
    """Physical cores of the fastest kind; None where all are alike or nothing is known.

    Intel's hybrid processors list their performance cores in their own PMU folder; elsewhere
    (Arm) the cores with the highest maximum frequency count, if others have clearly less.
    """
    hybrid = root / "sys/devices/cpu_core/cpus"
    cpus = root / "sys/devices/system/cpu"
    try:
        fast = parse_cpu_list(hybrid.read_text(encoding="ascii").strip())
    except (OSError, ValueError):
        fast = _fastest_by_frequency(cpus)
    if not fast:
        return None
    return len({_core_id(cpus, cpu) for cpu in fast})


def parse_cpu_list(text: str) -> frozenset[int]:
    """ "0-3,8" -> {0, 1, 2, 3, 8}."""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, dash, last = part.partition("-")
        cpus.update(range(int(first), int(last if dash else first) + 1))
    return frozenset(cpus)


def _fastest_by_frequency(cpus: Path) -> frozenset[int]:
    found: dict[int, int] = {}
    for path in cpus.glob("cpu[0-9]*/cpufreq/cpuinfo_max_freq"):
        try:
            found[int(path.parent.parent.name[3:])] = int(path.read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
    if not found:
        return frozenset()
    # Turbo bins of one kind differ by a few per cent, kinds of cores by a quarter and more.
    limit = 0.8 * max(found.values())
    fast = frozenset(cpu for cpu, khz in found.items() if khz >= limit)
    return fast if len(fast) < len(found) else frozenset()


def _core_id(cpus: Path, cpu: int) -> tuple[str, str]:
    topology = cpus / f"cpu{cpu}/topology"
    try:
        package = (topology / "physical_package_id").read_text(encoding="ascii").strip()
        return package, (topology / "core_id").read_text(encoding="ascii").strip()
    except OSError:
        return "", str(cpu)


def _normalized(flags: list[str]) -> frozenset[str]:
    return frozenset(_SPELLINGS.get(flag.lower(), flag.lower()) for flag in flags)
