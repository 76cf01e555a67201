"""Processor and memory limits of the control group that this process is in (Linux, v1 and v2).

A limit may be set at any level above the process, so the least along the path counts. Files that
are missing or unreadable limit nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_UNLIMITED_BYTES = 1 << 60  # v1 writes a huge number for "no limit"


def cpu_quota_cores(root: Path = Path("/")) -> float | None:
    """Processor time that the group may use, in cores; None without a limit."""
    quotas = []
    for folder in _folders(root, ""):
        if (words := _words(folder / "cpu.max")) and len(words) == 2 and words[0] != "max":
            quotas.append(_ratio(words[0], words[1]))
    for folder in _folders(root, "cpu"):
        quota, period = _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us")
        if quota and period and not quota[0].startswith("-"):
            quotas.append(_ratio(quota[0], period[0]))
    return min((q for q in quotas if q is not None), default=None)


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """Memory that the group may use; None without a limit."""
    limits = [_integer(folder / "memory.max") for folder in _folders(root, "")]
    limits += [_integer(folder / "memory.limit_in_bytes") for folder in _folders(root, "memory")]
    return min((x for x in limits if x is not None and x < _UNLIMITED_BYTES), default=None)


def memory_usage_bytes(root: Path = Path("/")) -> int | None:
    """Memory that the innermost group with an account uses."""
    for controller, name in (("", "memory.current"), ("memory", "memory.usage_in_bytes")):
        for folder in _folders(root, controller):
            if (used := _integer(folder / name)) is not None:
                return used
    return None


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the group and those above it, innermost first; "" is the v2 hierarchy."""
    for line in _lines(root / "proc/self/cgroup"):
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        _, controllers, path = parts
        if controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controllers if controller else "")
        if not base.is_dir() and controller:
            base = root / "sys/fs/cgroup" / controller
        relative = PurePosixPath(path.lstrip("/"))
        for inner in (relative, *relative.parents):
            yield base / inner


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    lines = _lines(path)
    return lines[0].split() if lines else []


def _integer(path: Path) -> int | None:
    words = _words(path)
    return int(words[0]) if words and words[0].isdigit() else None


def _ratio(quota: str, period: str) -> float | None:
    if not (quota.isdigit() and period.isdigit()) or int(period) == 0:
        return None
    return int(quota) / int(period)
