"""How many threads, and which of ONNX Runtime's integer kernels. Pure functions of the hardware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.runtime.errors import ConfigError
from headrace.runtime.hardware import HardwareInfo

_VNNI = ("avx512_vnni", "avx_vnni")


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """`reason` says which limit decided."""

    num_threads: int
    reason: str


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """`session_options`: entries for the session; `warning`: to be said once, or None."""

    name: str
    session_options: Mapping[str, str]
    warning: str | None


def choose_threads(hardware: HardwareInfo, requested: int | None) -> ThreadChoice:
    """One thread for each core that may be used: performance cores, one thread a physical core,
    within affinity and quota.

    Raises:
        ConfigError: more were asked for than this process may use.
    """
    allowed = _allowed(hardware)
    if requested is not None:
        if requested > allowed:
            raise ConfigError("num_threads", requested, f"at most {allowed} on this machine")
        return ThreadChoice(requested, "as asked for")
    limits = {
        "performance cores": hardware.performance_cores,
        "physical cores": hardware.physical_cores,
        "cores allowed by affinity": hardware.allowed_cores,
        "cores of the cgroup's quota": hardware.quota_cores,
    }
    usable = hardware.usable_cores
    deciding = [name for name, cores in limits.items() if cores is not None and cores <= usable]
    return ThreadChoice(usable, f"{usable} {deciding[-1] if deciding else 'core'}")


def choose_kernels(hardware: HardwareInfo) -> KernelChoice:
    """The integer GEMM that the processor has.

    Without VNNI, x86-64 multiplies u8 by s8 into saturating 16-bit sums: results are wrong by
    thousands unless ONNX Runtime is told to prefer precision.
    """
    if not hardware.is_x86_64:
        return KernelChoice(hardware.machine, {}, None)
    if "amx_int8" in hardware.features:
        return KernelChoice("amx", {}, None)
    if any(name in hardware.features for name in _VNNI):
        return KernelChoice("vnni", {}, None)
    return KernelChoice(
        "avx2" if "avx2" in hardware.features else "x86-64",
        {"session.x64quantprecision": "1"},
        "this processor has no VNNI: INT8 runs on slower kernels that do not saturate",
    )


def _allowed(hardware: HardwareInfo) -> int:
    """The most threads a user may ask for: hyper-threads too, but not beyond affinity or quota."""
    quota = hardware.quota_cores
    within_quota = hardware.allowed_cores if quota is None else max(1, -int(-quota // 1))
    return max(1, min(hardware.allowed_cores, within_quota))
