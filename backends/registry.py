"""Device names to backends. A backend's module is imported when it is asked for, not before."""

from __future__ import annotations

import difflib
from importlib import import_module
from pathlib import Path
from typing import cast

from headrace.backends.base import Backend
from headrace.runtime.config import EngineConfig
from headrace.runtime.errors import BackendUnavailableError, ConfigError
from headrace.runtime.machine.hardware import HardwareInfo
from headrace.runtime.manifest import Manifest

# In the order that "auto" prefers.
_BACKENDS = {"cpu": ("headrace.backends.cpu_avx512.backend", "CpuBackend")}
_PLANNED = {"cuda": "this version of headrace has no CUDA backend"}


def choose_device(device: str, manifest: Manifest) -> str:
    """The device to use: `device` itself, or for "auto" the best that the package has graphs for.

    Raises:
        ConfigError: no such device.
        BackendUnavailableError: it cannot be had; says what is missing.
    """
    known = ["auto", *_BACKENDS, *_PLANNED]
    if device not in known:
        close = difflib.get_close_matches(device, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError("device", device, f"one of {', '.join(known)}{hint}")
    if device in _PLANNED:
        raise BackendUnavailableError(
            f"device {device!r} cannot be used: {_PLANNED[device]}; use device='cpu'"
        )
    targets = {target.device for target in manifest.targets}
    usable = [name for name in _BACKENDS if name in targets and device in ("auto", name)]
    if not usable:
        wanted = " or ".join(_BACKENDS) if device == "auto" else device
        raise BackendUnavailableError(
            f"the package has graphs for {', '.join(sorted(targets)) or 'no device'}, "
            f"not for {wanted}; export it again with a target for it"
        )
    return usable[0]


def create_backend(
    device: str, folder: Path, manifest: Manifest, config: EngineConfig, hardware: HardwareInfo
) -> Backend:
    """The backend of a device that `choose_device` gave; not loaded yet."""
    module, name = _BACKENDS[device]
    kind = getattr(import_module(module), name)
    return cast(Backend, kind(folder, manifest, config, hardware))
