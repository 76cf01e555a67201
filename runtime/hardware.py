"""What this process may use: processor features, cores, memory.

Instruction sets are flags that were believed only after the instruction was executed in a child
process (`isa_probe`): some machines list features that die with SIGILL when used. Core counts honour
affinity and cgroup limits, so that a container does not start a thread for each core of its host.
"""

from __future__ import annotations

import math
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

from headrace.runtime import cgroups, isa_probe, topology


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareInfo:
    """One machine as this process sees it.

    Attributes:
        machine: "x86_64", "aarch64", ...
        cpu_name: brand string, empty where unknown.
        flags: instruction sets that the system lists, lower case (`avx2`, `avx512_vnni`, ...).
        features: instruction sets that were executed, or, where that is impossible, listed.
        logical_cores, physical_cores: of the machine.
        performance_cores: physical cores of the fastest kind.
        allowed_cores: logical cores that affinity lets this process use.
        quota_cores: cgroup limit on processor time, None without one.
        total_memory_bytes: of the machine, or the cgroup's limit where that is lower.
        available_memory_bytes: what this process may still take.
    """

    machine: str
    cpu_name: str
    flags: frozenset[str]
    features: frozenset[str]
    logical_cores: int
    physical_cores: int
    performance_cores: int
    allowed_cores: int
    quota_cores: float | None
    total_memory_bytes: int
    available_memory_bytes: int

    @property
    def is_x86_64(self) -> bool:
        return self.machine.lower() in ("x86_64", "amd64")

    @property
    def usable_cores(self) -> int:
        """Cores that it makes sense to run a thread on: the least of all limits, at least 1."""
        limits = [self.performance_cores, self.physical_cores, self.allowed_cores]
        if self.quota_cores is not None:
            limits.append(max(1, math.ceil(self.quota_cores)))
        return max(1, min(limits))


def probe_hardware(root: Path = Path("/")) -> HardwareInfo:
    """Look at this machine; `root` is where /proc and /sys are looked for."""
    cpu = _cpu()
    memory = psutil.virtual_memory()
    limit, used = cgroups.memory_limit_bytes(root), cgroups.memory_usage_bytes(root)
    total = min(memory.total, limit) if limit is not None else memory.total
    available = memory.available
    if limit is not None and used is not None:
        available = max(0, min(available, limit - used))
    logical = os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or logical
    return HardwareInfo(
        machine=platform.machine(),
        cpu_name=cpu.name,
        flags=cpu.flags,
        features=cpu.features,
        logical_cores=logical,
        physical_cores=physical,
        performance_cores=min(physical, topology.performance_cores(root) or physical),
        allowed_cores=_allowed_cores(logical),
        quota_cores=cgroups.cpu_quota_cores(root),
        total_memory_bytes=total,
        available_memory_bytes=available,
    )


@dataclass(frozen=True, slots=True)
class _Cpu:
    name: str
    flags: frozenset[str]
    features: frozenset[str]


@cache
def _cpu() -> _Cpu:
    """Once a process: none of it changes while a process lives."""
    name, flags = topology.cpu_name_and_flags()
    return _Cpu(name, flags, isa_probe.believed(flags))


def _allowed_cores(logical: int) -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return logical
