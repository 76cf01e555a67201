"""Folders that look like another machine's /proc and /sys, and descriptions of other hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.runtime.machine.hardware import HardwareInfo

GIB = 2**30
CPUS = "sys/devices/system/cpu"


def write_files(root: Path, files: Mapping[str, str]) -> Path:
    """`files`: content by path below `root`."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return root


def write_cores(
    root: Path, cores: Sequence[Sequence[int]], max_khz: Mapping[int, int] | None = None
) -> Path:
    """A topology: each core is the list of its hyper-threads; `max_khz` by processor."""
    cpus = sorted(cpu for core in cores for cpu in core)
    files = {f"{CPUS}/online": ",".join(map(str, cpus)) + "\n"}
    for core in cores:
        for cpu in core:
            siblings = ",".join(map(str, core)) + "\n"
            files[f"{CPUS}/cpu{cpu}/topology/core_cpus_list"] = siblings
    for cpu, khz in (max_khz or {}).items():
        files[f"{CPUS}/cpu{cpu}/cpufreq/cpuinfo_max_freq"] = f"{khz}\n"
    return write_files(root, files)


def hardware(**changes: Any) -> HardwareInfo:
    """Eight cores with two hyper-threads each and VNNI, and what `changes` says."""
    fields: dict[str, Any] = {
        "machine": "x86_64",
        "cpu_vendor": "GenuineIntel",
        "cpu_name": "Some Xeon",
        "flags": frozenset({"avx2", "avx512f", "avx512_vnni"}),
        "probes": (),
        "features": frozenset({"avx2", "avx512f", "avx512_vnni"}),
        "logical_cores": 16,
        "physical_cores": 8,
        "performance_cores": 8,
        "allowed_cores": 16,
        "allowed_physical_cores": 8,
        "allowed_performance_cores": 8,
        "quota_cores": None,
        "numa_nodes": 1,
        "total_memory_bytes": 32 * GIB,
        "available_memory_bytes": 16 * GIB,
    }
    return HardwareInfo(**{**fields, **changes})
