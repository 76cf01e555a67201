"""Which of a package's targets a backend runs."""

from __future__ import annotations

from pathlib import Path

from headrace.runtime.errors import ConfigError, PackageError
from headrace.runtime.manifest import Manifest, TargetInfo


def choose_target(
    folder: Path, manifest: Manifest, device: str, name: str | None, *, ranks: bool = False
) -> TargetInfo:
    """The target of that name for a device, or the first.

    Args:
        ranks: whether it is to be one that is split between processes.

    Raises:
        PackageError: the package has none for the device.
        ConfigError: none of that name.
    """
    targets = {
        target.name: target
        for target in manifest.targets
        if target.device == device and bool(target.ranks) == ranks
    }
    if not targets:
        remedy = {"cpu": "for the CPU", "cuda": "again with --target cpu,cuda_fp16"}[device]
        raise PackageError(f"{folder} has no {device.upper()} target; export it {remedy}")
    if name is None:
        return next(iter(targets.values()))
    if name not in targets:
        raise ConfigError("target", name, f"one of {', '.join(targets)}")
    return targets[name]
