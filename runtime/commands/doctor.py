"""`headrace doctor`: what is installed, what the machine has, what is chosen on it and why.

`collect` gathers facts and never fails for want of one; `render` is pure.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from headrace.backends.cpu_avx512.threads import (
    KernelChoice,
    ThreadChoice,
    choose_kernels,
    choose_threads,
)
from headrace.backends.ort_import import TELEMETRY_VARIABLE, load_onnxruntime
from headrace.runtime.errors import BackendUnavailableError
from headrace.runtime.machine import isa_probe, topology
from headrace.runtime.machine.cards import Gpu, best_use
from headrace.runtime.machine.hardware import HardwareInfo, probe_hardware

_PACKAGES = ("headrace", "numpy", "tokenizers", "jinja2", "psutil", "py-cpuinfo", "nvidia-ml-py")

# What onnxruntime, its kernels and numpy's BLAS read. They change speed, and some of them results.
_ENVIRONMENT = (
    *("ORT_", "MLAS_", "ONNXRUNTIME_"),
    *("OMP_", "GOMP_", "KMP_", "OPENBLAS_", "MKL_"),
    *("HEADRACE_", "CUDA_"),
)
_GB = 1e9


@dataclass(frozen=True, slots=True)
class Feature:
    """An instruction set: whether the system and py-cpuinfo list it, whether executing it works.

    `works` is None where it was not tried.
    """

    name: str
    listed: bool
    listed_by_py_cpuinfo: bool
    works: bool | None


@dataclass(frozen=True, slots=True)
class OrtFacts:
    """`distributions`: installed packages that share the module folder, with versions.

    `version` and `providers` are those of the module that loads, `error` says why none does.
    """

    distributions: Mapping[str, str]
    version: str | None
    providers: tuple[str, ...]
    error: str | None


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """`note` says why there are none."""

    gpus: tuple[Gpu, ...]
    driver: str | None
    note: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """Attributes:
    system: operating system, and Python with its version.
    versions: of installed packages.
    hardware: what the process may use.
    features: instruction sets that there are probes for; none on other architectures.
    probe_obstacle: why instructions were not executed, None if they were.
    threads, kernels: what a CPU session gets unless told otherwise.
    telemetry: of onnxruntime, "off" or "on" with the reason.
    environment: variables that change how things run.
    warnings: what someone should do something about.
    """

    system: str
    python: str
    versions: Mapping[str, str]
    onnxruntime: OrtFacts
    hardware: HardwareInfo
    features: tuple[Feature, ...]
    probe_obstacle: str | None
    threads: ThreadChoice
    kernels: KernelChoice
    telemetry: str
    gpu: GpuFacts
    environment: Mapping[str, str]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        fields = dataclasses.asdict(self)
        hardware = fields["hardware"]
        for name in ("flags", "features"):
            hardware[name] = sorted(hardware[name])
        return fields


def collect() -> DoctorReport:
    """Look at everything; takes a second or two, most of it py-cpuinfo."""
    environment = dict(os.environ)  # before loading onnxruntime adds to it
    telemetry = telemetry_state(environment)
    ort = _ort_facts()
    hardware = probe_hardware()
    named = topology.ask_py_cpuinfo()
    features = compare_features(hardware, named.flags)
    kernels = choose_kernels(hardware)
    if not hardware.cpu_name:
        hardware = dataclasses.replace(hardware, cpu_name=named.brand, cpu_vendor=named.vendor)
    return DoctorReport(
        system=platform.platform(),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        versions=_versions(_PACKAGES),
        onnxruntime=ort,
        hardware=hardware,
        features=features,
        probe_obstacle=isa_probe.obstacle(),
        threads=choose_threads(hardware, None),
        kernels=kernels,
        telemetry=telemetry,
        gpu=_gpu_facts(),
        environment=relevant_environment(environment),
        warnings=find_warnings(ort, features, kernels, telemetry),
    )


def compare_features(hardware: HardwareInfo, listed: frozenset[str]) -> tuple[Feature, ...]:
    """Flags beside what executing showed; `listed` are py-cpuinfo's flags."""
    if not hardware.is_x86_64:
        return ()
    works = {probe.feature: probe.works for probe in hardware.probes}
    return tuple(
        Feature(name, name in hardware.flags, name in listed, works.get(name))
        for name in isa_probe.PROBED
    )


def relevant_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that change how things run, in the order of their names."""
    return {k: v for k, v in sorted(environment.items()) if k.startswith(_ENVIRONMENT)}


def telemetry_state(environment: Mapping[str, str]) -> str:
    """What onnxruntime makes of the variable; only these two values were seen to switch it off."""
    value = environment.get(TELEMETRY_VARIABLE)
    if value is None:
        return f"off: headrace sets {TELEMETRY_VARIABLE}=1 before onnxruntime loads"
    state = "off" if value in ("1", "true") else "on"
    return f"{state}: the environment has {TELEMETRY_VARIABLE}={value}"


def find_warnings(
    ort: OrtFacts, features: Sequence[Feature], kernels: KernelChoice, telemetry: str
) -> tuple[str, ...]:
    """What someone should do something about."""
    found = []
    if ort.error is not None:
        found.append(ort.error)
    if len(ort.distributions) > 1:
        found.append(
            f"{' and '.join(ort.distributions)} are installed together and overwrite each "
            "other's files; uninstall all of them, then install headrace[cpu] or headrace[cuda]"
        )
    found += [
        f"{feature.name} is listed but fails when executed; programs that believe the flag die"
        for feature in features
        if feature.listed and feature.works is False
    ]
    if kernels.warning is not None:
        found.append(kernels.warning)
    if telemetry.startswith("on"):
        found.append(f"onnxruntime may send telemetry; set {TELEMETRY_VARIABLE}=1 or unset it")
    return tuple(found)


def render(report: DoctorReport) -> str:
    """The report for people."""
    hw = report.hardware
    quota = "no cgroup quota" if hw.quota_cores is None else f"cgroup quota {hw.quota_cores:g}"
    processor = ", ".join(filter(None, (hw.cpu_name, hw.cpu_vendor, hw.machine)))
    options = ", ".join(f"{k}={v}" for k, v in report.kernels.session_options.items())
    sections = [
        ("system", [report.system, report.python]),
        ("packages", [", ".join(f"{name} {v}" for name, v in report.versions.items())]),
        ("onnxruntime", _render_ort(report.onnxruntime)),
        ("telemetry", [report.telemetry]),
        ("processor", [processor, *_render_features(report)]),
        (
            "cores",
            [
                f"{hw.logical_cores} logical, {hw.physical_cores} physical, "
                f"{hw.performance_cores} performance, NUMA nodes {hw.numa_nodes}",
                f"this process: affinity {hw.allowed_cores} logical, "
                f"{hw.allowed_physical_cores} physical, "
                f"{hw.allowed_performance_cores} performance; {quota}",
            ],
        ),
        (
            "memory",
            [
                f"{hw.total_memory_bytes / _GB:.1f} GB, "
                f"{hw.available_memory_bytes / _GB:.1f} GB available to this process"
            ],
        ),
        ("gpu", _render_gpu(report.gpu)),
        ("threads", [f"{report.threads.num_threads}: {report.threads.reason}"]),
        ("kernels", [report.kernels.name + (f", {options}" if options else "")]),
        ("environment", [f"{k}={v}" for k, v in report.environment.items()] or ["nothing set"]),
        ("warnings", list(report.warnings) or ["none"]),
    ]
    return "\n".join(
        f"{title if i == 0 else '':13}{line}"
        for title, lines in sections
        for i, line in enumerate(lines)
    )


def _render_ort(ort: OrtFacts) -> list[str]:
    installed = ", ".join(f"{name} {version}" for name, version in ort.distributions.items())
    lines = [f"installed: {installed or 'nothing'}"]
    if ort.version is not None:
        lines.append(f"loaded: {ort.version} with {', '.join(ort.providers)}")
    return lines


def _render_features(report: DoctorReport) -> list[str]:
    if not report.features:
        return [f"features: {' '.join(sorted(report.hardware.features)) or 'none known'}"]
    lines = [f"{'feature':13}{'system':9}{'py-cpuinfo':12}executed"]
    for feature in report.features:
        outcome = {True: "works", False: "FAILS", None: "not tried"}[feature.works]
        if feature.works and not (feature.listed or feature.listed_by_py_cpuinfo):
            outcome += ", though not listed"
        listed = "listed" if feature.listed else "-"
        lines.append(
            f"{feature.name:13}{listed:9}"
            f"{'listed' if feature.listed_by_py_cpuinfo else '-':12}{outcome}"
        )
    if report.probe_obstacle is not None:
        lines.append(f"not executed: {report.probe_obstacle}")
    return lines


def _render_gpu(facts: GpuFacts) -> list[str]:
    lines = [
        f"{gpu.name}, compute capability {gpu.compute_capability}, "
        f"{gpu.total_memory_bytes / _GB:.1f} GB, {gpu.free_memory_bytes / _GB:.1f} GB free"
        for gpu in facts.gpus
    ]
    if len(facts.gpus) > 1:
        lines.append(f"best use: {best_use(facts.gpus).reason} (ranks on cards cannot be run yet)")
    if facts.driver is not None:
        lines.append(f"driver {facts.driver}")
    return lines + ([facts.note] if facts.note is not None else [])


def _versions(names: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _ort_facts() -> OrtFacts:
    names = sorted(set(metadata.packages_distributions().get("onnxruntime", ())))
    distributions = _versions(names)
    try:
        ort = load_onnxruntime()
    except BackendUnavailableError as error:
        return OrtFacts(distributions, None, (), str(error))
    return OrtFacts(distributions, ort.__version__, tuple(ort.get_available_providers()), None)


def _gpu_facts() -> GpuFacts:
    """NVIDIA's cards, asked through NVML: its package is optional, and so is the driver."""
    try:
        import pynvml
    except ImportError:
        return GpuFacts((), None, "not looked for: nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return GpuFacts((), None, f"none found: {error}")
    try:
        gpus = tuple(_gpu(pynvml, i) for i in range(pynvml.nvmlDeviceGetCount()))
        return GpuFacts(gpus, str(pynvml.nvmlSystemGetDriverVersion()), None)
    except pynvml.NVMLError as error:
        return GpuFacts((), None, f"NVML fails: {error}")
    finally:
        pynvml.nvmlShutdown()


def _gpu(pynvml: Any, index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    name = str(pynvml.nvmlDeviceGetName(handle))
    peers = [i for i in range(pynvml.nvmlDeviceGetCount()) if i != index]
    linked = tuple(i for i in peers if _is_linked(pynvml, handle, i))
    return Gpu(name, f"{major}.{minor}", int(memory.total), int(memory.free), linked)


def _is_linked(pynvml: Any, handle: Any, peer: int) -> bool:
    other = pynvml.nvmlDeviceGetHandleByIndex(peer)
    kind = pynvml.NVML_P2P_CAPS_INDEX_NVLINK
    status = pynvml.nvmlDeviceGetP2PStatus(handle, other, kind)
    return bool(status == pynvml.NVML_P2P_STATUS_OK)
