"""The machine that the figures are of."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

QUIET_LOAD = 0.7  # of one core; above it, somebody else is at work


@dataclass(frozen=True, slots=True)
class Machine:
    """`cores`: physical cores that this process may use; `load`: runnable threads of late."""

    cpu: str
    cores: int
    logical_cpus: int
    system: str
    python: str
    load: float | None


def this_machine() -> Machine:
    return Machine(
        cpu=_cpu_name(),
        cores=_physical_cores(),
        logical_cpus=os.cpu_count() or 1,
        system=f"{platform.system()} {platform.release()}",
        python=sys.version.split()[0],
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )


def busy_cpu_s() -> float | None:
    """CPU time that all processes of this machine have used, in seconds; None where untold."""
    try:
        return busy_cpu_s_of(Path("/proc/stat").read_text("utf-8"), os.sysconf("SC_CLK_TCK"))
    except OSError:
        return None


def busy_cpu_s_of(stat: str, ticks_per_s: int) -> float:
    """From the text of /proc/stat: all but idle and waiting for disks; guests are in user."""
    user, nice, system, _idle, _disks, *interrupts = (int(n) for n in stat.split()[1:9])
    return (user + nice + system + sum(interrupts)) / ticks_per_s


def _cpu_name() -> str:
    """Name, family, model and stepping on Linux: virtual machines tell little in the name."""
    try:
        return cpu_name_of(Path("/proc/cpuinfo").read_text("utf-8"))
    except OSError:
        return platform.processor() or platform.machine()


def cpu_name_of(cpuinfo: str) -> str:
    """From the text of /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name")
    if not name:
        return platform.machine()
    numbers = [
        f"{key} {fields[key]}" for key in ("cpu family", "model", "stepping") if key in fields
    ]
    return f"{name} ({', '.join(numbers)})" if numbers else name


def _physical_cores() -> int:
    if not hasattr(os, "sched_getaffinity"):
        if sys.platform == "darwin":
            told = subprocess.run(
                ["sysctl", "-n", "hw.physicalcpu"], capture_output=True, text=True
            )
            if told.stdout.strip().isdigit():
                return int(told.stdout)
        return os.cpu_count() or 1
    cpus = os.sched_getaffinity(0)
    siblings = Path("/sys/devices/system/cpu")
    try:
        return count_cores(
            (siblings / f"cpu{cpu}/topology/thread_siblings_list").read_text() for cpu in cpus
        )
    except OSError:
        return len(cpus)


def count_cores(siblings_of_cpus: Iterable[str]) -> int:
    """Cores behind some logical CPUs; each is told by the list of all that share its core."""
    return len({siblings.strip() for siblings in siblings_of_cpus})
