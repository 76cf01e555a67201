"""Device names to backends. A backend's module is imported when it is asked for, not before."""

from __future__ import annotations

import difflib
import logging
from importlib import import_module
from pathlib import Path
from typing import cast

from headrace.backends.base import Backend
from headrace.runtime.config import EngineConfig
from headrace.runtime.errors import BackendUnavailableError, ConfigError
from headrace.runtime.machine.hardware import HardwareInfo
from headrace.runtime.manifest import Manifest

logger = logging.getLogger(__name__)

# In the order that "auto" prefers.
_BACKENDS = {
    "cuda": ("headrace.backends.cuda.backend", "CudaBackend"),
    "cpu": ("headrace.backends.cpu_avx512.backend", "CpuBackend"),
}
# What runs a target that is split between processes.
_RANKS = {"cpu": ("headrace.backends.tensor_parallel.backend", "TensorParallelBackend")}
# What says why a device cannot be used, or None; the CPU always can.
_OBSTACLES = {"cuda": ("headrace.backends.cuda.provider", "obstacle")}


def choose_device(device: str, manifest: Manifest) -> str:
    """The device to use: `device` itself, or for "auto" the best that the package has graphs for
    and that works here.

    Raises:
        ConfigError: no such device.
        BackendUnavailableError: it cannot be had; says what is missing.
    """
    known = ["auto", *_BACKENDS]
    if device not in known:
        close = difflib.get_close_matches(device, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError("device", device, f"one of {', '.join(known)}{hint}")
    targets = {target.device for target in manifest.targets}
    runnable = {t.device for t in manifest.targets if not t.ranks or t.device in _RANKS}
    usable = [name for name in _BACKENDS if name in runnable and device in ("auto", name)]
    if not usable and device in ("auto", *targets):
        raise BackendUnavailableError(
            "the package is split between processes, which only the CPU has a backend for so far; "
            "export it without --tensor-parallel"
        )
    if not usable:
        wanted = " or ".join(_BACKENDS) if device == "auto" else device
        raise BackendUnavailableError(
            f"the package has graphs for {', '.join(sorted(targets)) or 'no device'}, "
            f"not for {wanted}; export it again with a target for it"
        )
    reasons = []
    for name in usable:
        reason = _obstacle(name)
        if reason is None:
            return name
        reasons.append(f"device {name!r} cannot be used: {reason}")
        if name != usable[-1]:
            logger.warning("%s; using %s", reasons[-1], usable[-1])
    raise BackendUnavailableError("; ".join(reasons))


def _obstacle(name: str) -> str | None:
    if name not in _OBSTACLES:
        return None
    module, function = _OBSTACLES[name]
    return cast(str | None, getattr(import_module(module), function)())


def create_backend(
    device: str, folder: Path, manifest: Manifest, config: EngineConfig, hardware: HardwareInfo
) -> Backend:
    """The backend of a device that `choose_device` gave; not loaded yet."""
    module, name = (_RANKS if is_split(device, manifest, config.target) else _BACKENDS)[device]
    kind = getattr(import_module(module), name)
    return cast(Backend, kind(folder, manifest, config, hardware))


def is_split(device: str, manifest: Manifest, name: str | None) -> bool:
    """Whether the target to load is one of several processes: the one of that name, or all."""
    targets = [t for t in manifest.targets if t.device == device and device in _RANKS]
    named = [t for t in targets if t.name == name] or targets
    return bool(named) and all(t.ranks for t in named)
