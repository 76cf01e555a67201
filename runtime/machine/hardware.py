"""What this process may use: processor features, cores, memory.

Instruction sets are flags that were believed only after the instruction was executed in a child
process (`isa_probe`): some machines list features that die with SIGILL when used. Core counts
honour affinity and cgroup limits, so that a container does not start a thread for each core of its
host.
"""

from __future__ import annotations

import math
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

from headrace.runtime.machine import cgroups, isa_probe, topology
from headrace.runtime.machine.isa_probe import ProbeResult
from headrace.runtime.machine.topology import CoreCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareInfo:
    """One machine as this process sees it.

    Attributes:
        machine: "x86_64", "aarch64", ...
        cpu_vendor, cpu_name: "GenuineIntel" and brand string, empty where unknown.
        flags: instruction sets that the system lists, lower case (`avx2`, `avx512_vnni`, ...).
        probes: instructions that were tried, and whether they work.
        features: instruction sets to rely on: those that work, and listed ones without a probe.
        logical_cores, physical_cores: of the machine; hyper-threads count in the first only.
        performance_cores: physical cores of the fastest kind.
        allowed_cores: logical cores that affinity leaves to this process.
        allowed_physical_cores: physical cores behind them.
        allowed_performance_cores: those of the fastest kind, or all if it has none of them.
        quota_cores: cgroup limit on processor time, None without one.
        numa_nodes: memory nodes with processors.
        total_memory_bytes: of the machine, or the cgroup's limit where that is lower.
        available_memory_bytes: what this process may still take.
    """

    machine: str
    cpu_vendor: str
    cpu_name: str
    flags: frozenset[str]
    probes: tuple[ProbeResult, ...]
    features: frozenset[str]
    logical_cores: int
    physical_cores: int
    performance_cores: int
    allowed_cores: int
    allowed_physical_cores: int
    allowed_performance_cores: int
    quota_cores: float | None
    numa_nodes: int
    total_memory_bytes: int
    available_memory_bytes: int

    @property
    def is_x86_64(self) -> bool:
        return isa_probe.is_x86_64(self.machine)

    @property
    def usable_cores(self) -> int:
        """Cores that it makes sense to run a thread on: the least of all limits, at least 1."""
        if self.quota_cores is None:
            return max(1, self.allowed_performance_cores)
        return max(1, min(self.allowed_performance_cores, math.ceil(self.quota_cores)))


def probe_hardware(root: Path = Path("/")) -> HardwareInfo:
    """Look at this machine; `root` is where /proc and /sys are looked for. About 30 ms.

    Nothing is kept but names and flags, which do not change while a process lives.
    """
    cpu = _cpu(root)
    cores = _cores(root)
    memory = psutil.virtual_memory()
    limit, left = cgroups.memory_limit_bytes(root), cgroups.memory_available_bytes(root)
    return HardwareInfo(
        machine=platform.machine(),
        cpu_vendor=cpu.vendor,
        cpu_name=cpu.name,
        flags=cpu.flags,
        probes=cpu.probes,
        features=isa_probe.believed(cpu.flags, cpu.probes),
        logical_cores=cores.logical,
        physical_cores=cores.physical,
        performance_cores=cores.performance,
        allowed_cores=min(len(_allowed_cpus()), cores.logical),
        allowed_physical_cores=cores.allowed_physical,
        allowed_performance_cores=cores.allowed_performance,
        quota_cores=cgroups.cpu_quota_cores(root),
        numa_nodes=topology.count_numa_nodes(root),
        total_memory_bytes=_least(memory.total, limit),
        available_memory_bytes=_least(memory.available, left),
    )


@dataclass(frozen=True, slots=True)
class _Cpu:
    vendor: str
    name: str
    flags: frozenset[str]
    probes: tuple[ProbeResult, ...]


@cache
def _cpu(root: Path) -> _Cpu:
    """Once a process.

    Where the system lists no flags (Windows, macOS) all probes are tried, which tells the same in
    far less time than py-cpuinfo; that is asked where instructions cannot be tried either.
    """
    listed = topology.read_cpuinfo(root)
    if listed.flags or not isa_probe.is_x86_64(platform.machine()):
        probes = isa_probe.probe(listed.flags)
    elif isa_probe.obstacle() is None:
        probes = isa_probe.probe(isa_probe.PROBED)
    else:
        listed = topology.ask_py_cpuinfo()
        probes = isa_probe.probe(listed.flags)
    return _Cpu(listed.vendor, listed.brand or platform.processor(), listed.flags, probes)


def _cores(root: Path) -> CoreCounts:
    allowed = _allowed_cpus()
    if (counts := topology.count_cores(root, allowed)) is not None:
        return counts
    logical = os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or logical
    left = min(physical, len(allowed))  # which of them share a core is not known here
    return CoreCounts(logical, physical, physical, left, left)


def _allowed_cpus() -> frozenset[int]:
    """Processors that affinity leaves to this process, by number."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    try:
        return frozenset(psutil.Process().cpu_affinity())  # Windows
    except (AttributeError, OSError, psutil.Error):
        return frozenset(range(os.cpu_count() or 1))  # macOS has no affinity


def _least(amount: int, limit: int | None) -> int:
    return amount if limit is None else min(amount, limit)
