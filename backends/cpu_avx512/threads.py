"""How many threads, and which of ONNX Runtime's integer kernels. Pure functions of the hardware."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from headrace.runtime.errors import ConfigError
from headrace.runtime.machine.hardware import HardwareInfo

# onnxruntime 1.32 has tile kernels for 8-bit integers only; its bf16 ones do not exist.
_TILES = "amx_int8"
_VNNI = ("avx512_vnni", "avx_vnni")
WIDE_ROWS = "w8a8_row"  # the format of weights whose products may saturate


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """`reason` says which limit decided."""

    num_threads: int
    reason: str


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """`session_options`: entries for the session; `warning`: to be said once, or None.

    `exact_4bit`: 4-bit products give a row the same bits alone and in company. ONNX Runtime's
    kernels without AVX-512 do not: one row is summed in another order than many.
    """

    name: str
    session_options: Mapping[str, str]
    warning: str | None
    exact_4bit: bool


def choose_threads(hardware: HardwareInfo, requested: int | None) -> ThreadChoice:
    """One thread for each core that may be used: performance cores, one thread a physical core,
    within affinity and quota.

    Hyper-threads can be had by asking for them, more than affinity or quota allow cannot: threads
    of one session wait for each other, so a descheduled one stalls all.

    Raises:
        ConfigError: more were asked for than this process may use; names the allowance.
    """
    if requested is None:
        return ThreadChoice(hardware.usable_cores, _deciding_limit(hardware))
    allowed, why = _allowance(hardware)
    if not 1 <= requested <= allowed:
        raise ConfigError("num_threads", requested, f"1 to {allowed} ({why}), or None")
    return ThreadChoice(requested, f"as asked for, of {allowed} allowed ({why})")


def choose_kernels(hardware: HardwareInfo, formats: Collection[str] = (WIDE_ROWS,)) -> KernelChoice:
    """The integer GEMM that the processor has.

    Without VNNI, x86-64 multiplies u8 by s8 into saturating 16-bit sums: results are wrong by a
    quarter of their range unless ONNX Runtime is told to prefer precision, or the weights are of
    reduced range.

    Args:
        formats: of the package's weights.
    """
    if not hardware.is_x86_64:
        return KernelChoice(hardware.machine, {}, None, exact_4bit=False)
    exact_4bit = "avx512_vnni" in hardware.features
    if _TILES in hardware.features:
        return KernelChoice("amx", {}, None, exact_4bit)
    if any(name in hardware.features for name in _VNNI):
        return KernelChoice("vnni", {}, None, exact_4bit)
    name = "avx2" if "avx2" in hardware.features else "x86-64"
    if WIDE_ROWS not in formats:
        return KernelChoice(name, {}, None, exact_4bit)
    return KernelChoice(
        name,
        {"session.x64quantprecision": "1"},
        "this processor has no VNNI: INT8 runs on slower kernels that do not saturate; a package "
        "exported with --precision w7a8_row is faster here",
        exact_4bit,
    )


def _allowance(hardware: HardwareInfo) -> tuple[int, str]:
    """The most threads a user may ask for, hyper-threads too, and what limits them."""
    allowed, quota = max(1, hardware.allowed_cores), hardware.quota_cores
    if quota is not None and max(1, math.ceil(quota)) < allowed:
        return max(1, math.ceil(quota)), f"the cgroup's quota is {quota:g} cores"
    return allowed, f"{_count(allowed, 'logical core')} left by affinity"


def _deciding_limit(hardware: HardwareInfo) -> str:
    """The limit that `usable_cores` comes from, the last one that took something away."""
    hw = hardware
    if hw.quota_cores is not None and math.ceil(hw.quota_cores) < hw.allowed_performance_cores:
        return f"the cgroup's quota is {hw.quota_cores:g} cores"
    if hw.allowed_cores < hw.logical_cores:
        cores = _count(hw.allowed_performance_cores, "physical core")
        return f"affinity leaves {cores} of {hw.physical_cores}"
    if hw.performance_cores < hw.physical_cores:
        return f"{_count(hw.performance_cores, 'performance core')} of {hw.physical_cores} cores"
    if hw.physical_cores < hw.logical_cores:
        return f"one for each of {_count(hw.physical_cores, 'physical core')}, no hyper-threads"
    return f"one for each of {_count(hw.physical_cores, 'core')}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
