"""Processor and memory limits of the control group that this process is in (Linux, v1 and v2).

A limit may be set at any level above the process, so the least along the path counts. Files that
are missing or unreadable limit nothing. In a container the group's path may name folders of the
host that are not mounted here; the mount's own root, which is looked at last, then has the limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_UNLIMITED_BYTES = 1 << 60  # v1 writes a huge number for "no limit"

# File cache is charged to the group that read the file, and given back when memory runs short: a
# model's memory-mapped weights do not use up the limit. v1 has the sums over subgroups in total_*.
_RECLAIMABLE_V2 = ("inactive_file", "active_file")
_RECLAIMABLE_V1 = ("total_inactive_file", "total_active_file")


def cpu_quota_cores(root: Path = Path("/")) -> float | None:
    """Processor time that the group may use, in cores; None without a limit."""
    quotas = []
    for folder in _folders(root, ""):
        if len(words := _words(folder / "cpu.max")) == 2:
            quotas.append(_ratio(words[0], words[1]))
    for folder in _folders(root, "cpu"):
        quota, period = _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us")
        if quota and period:
            quotas.append(_ratio(quota[0], period[0]))
    return min((q for q in quotas if q is not None), default=None)


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """Memory that the group may use; None without a limit."""
    return min((limit for limit, _ in _memory(root)), default=None)


def memory_available_bytes(root: Path = Path("/")) -> int | None:
    """Memory that the group may still take; None without a limit.

    At each level the limit less what all processes below it use, file cache not counted.
    """
    return min((max(0, limit - used) for limit, used in _memory(root)), default=None)


def _memory(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used), in bytes, of every level that has a limit."""
    for folder in _folders(root, ""):
        if (limit := _limit(folder / "memory.max")) is not None:
            yield limit, _used(folder, "memory.current", _RECLAIMABLE_V2)
    for folder in _folders(root, "memory"):
        if (limit := _limit(folder / "memory.limit_in_bytes")) is not None:
            yield limit, _used(folder, "memory.usage_in_bytes", _RECLAIMABLE_V1)


def _limit(path: Path) -> int | None:
    words = _words(path)
    if not words or not _is_number(words[0]):  # "max"
        return None
    limit = int(words[0])
    return limit if limit < _UNLIMITED_BYTES else None


def _used(folder: Path, total: str, reclaimable: tuple[str, ...]) -> int:
    words = _words(folder / total)
    used = int(words[0]) if words and _is_number(words[0]) else 0
    for line in _lines(folder / "memory.stat"):
        name, _, value = line.partition(" ")
        if name in reclaimable and _is_number(value):
            used -= int(value)
    return max(0, used)


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the group and those above it, innermost first; "" is the v2 hierarchy."""
    for line in _lines(root / "proc/self/cgroup"):
        parts = line.split(":", 2)
        if len(parts) != 3 or controller not in parts[1].split(","):
            continue
        relative = PurePosixPath(parts[2].lstrip("/"))
        for base in _mounts(root, parts[1], controller):
            for inner in (relative, *relative.parents):
                yield base / inner


def _mounts(root: Path, controllers: str, controller: str) -> tuple[Path, ...]:
    """Where a hierarchy may be mounted: "cpu,cpuacct" as that folder or as `cpu`."""
    base = root / "sys/fs/cgroup"
    if not controller:
        return (base, base / "unified")  # the second where v1 and v2 are mounted side by side
    return tuple(base / name for name in dict.fromkeys((controllers, controller)))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError):  # ValueError: a zero byte in a path
        return []


def _words(path: Path) -> list[str]:
    lines = _lines(path)
    return lines[0].split() if lines else []


def _is_number(text: str) -> bool:
    # Bounded, since int() refuses very long numbers.
    return text.isascii() and text.isdigit() and len(text) <= 20


def _ratio(quota: str, period: str) -> float | None:
    """None for "max" and -1, which are no limits, and for nonsense."""
    if not (_is_number(quota) and _is_number(period)) or int(period) == 0:
        return None
    return int(quota) / int(period)
