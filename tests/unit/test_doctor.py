"""The doctor's findings about machines and installations that are not this one."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
from fake_machine import hardware

from headrace.backends.cpu_avx512.threads import choose_kernels, choose_threads
from headrace.runtime.commands import doctor
from headrace.runtime.commands.doctor import DoctorReport, Feature, GpuFacts, OrtFacts
from headrace.runtime.errors import BackendUnavailableError
from headrace.runtime.machine.cards import Gpu, best_use
from headrace.runtime.machine.hardware import HardwareInfo
from headrace.runtime.machine.isa_probe import PROBED, ProbeResult

CPU_ONLY = OrtFacts({"onnxruntime": "1.32.0"}, "1.32.0", ("CPUExecutionProvider",), None)
AVX2_ONLY = frozenset({"avx2"})


def report(hw: HardwareInfo | None = None, **changes: Any) -> DoctorReport:
    hw = hw or hardware()
    fields: dict[str, Any] = {
        "system": "Linux-6.1",
        "python": "CPython 3.11.7",
        "versions": {"headrace": "0.1.0", "numpy": "2.4.6"},
        "onnxruntime": CPU_ONLY,
        "hardware": hw,
        "features": doctor.compare_features(hw, hw.flags),
        "probe_obstacle": None,
        "threads": choose_threads(hw, None),
        "kernels": choose_kernels(hw),
        "telemetry": "off: so",
        "gpu": GpuFacts((), None, "none found"),
        "environment": {},
        "warnings": (),
    }
    return DoctorReport(**{**fields, **changes})


@pytest.fixture(scope="module")
def here() -> DoctorReport:
    return doctor.collect()


def test_this_machine_as_json(here: DoctorReport) -> None:
    plain = json.loads(json.dumps(here.to_dict()))
    assert plain["versions"]["headrace"] == metadata.version("headrace")
    assert plain["onnxruntime"]["version"]
    assert "CPUExecutionProvider" in plain["onnxruntime"]["providers"]
    assert plain["hardware"]["physical_cores"] >= 1
    assert plain["threads"]["num_threads"] == here.hardware.usable_cores
    assert plain["kernels"]["name"] == here.kernels.name
    assert plain["hardware"]["flags"] == sorted(here.hardware.flags)


def test_this_machine_as_text(here: DoctorReport) -> None:
    text = doctor.render(here)
    assert f"threads      {here.threads.num_threads}: {here.threads.reason}" in text
    assert here.hardware.cpu_name in text
    assert all(len(line) < 200 for line in text.splitlines())


def test_flags_beside_what_executing_showed() -> None:
    found = hardware(
        flags=frozenset({"avx2", "amx_int8"}),
        probes=(ProbeResult("avx2", True), ProbeResult("amx_int8", False)),
    )
    features = doctor.compare_features(found, frozenset({"avx2", "avx_vnni"}))
    assert [feature.name for feature in features] == list(PROBED)
    by_name = {feature.name: feature for feature in features}
    assert by_name["avx2"] == Feature("avx2", True, True, True)
    assert by_name["amx_int8"] == Feature("amx_int8", True, False, False)
    assert by_name["avx_vnni"] == Feature("avx_vnni", False, True, None)
    text = doctor.render(report(found, features=features))
    assert "amx_int8     listed   -           FAILS" in text
    assert "avx_vnni     -        listed      not tried" in text
    warnings = doctor.find_warnings(CPU_ONLY, features, choose_kernels(hardware()), "off")
    assert [warning.split(" is listed")[0] for warning in warnings] == ["amx_int8"]


def test_why_nothing_was_executed_is_said() -> None:
    text = doctor.render(report(probe_obstacle="HEADRACE_SKIP_PROBES is set"))
    assert "not executed: HEADRACE_SKIP_PROBES is set" in text


def test_arm_has_no_probes() -> None:
    found = hardware(
        machine="aarch64", flags=frozenset({"dotprod"}), features=frozenset({"dotprod"})
    )
    assert doctor.compare_features(found, frozenset()) == ()
    text = doctor.render(report(found, probe_obstacle="there are no probes for aarch64"))
    assert "features: dotprod" in text


def test_two_onnxruntimes_in_one_folder() -> None:
    both = OrtFacts({"onnxruntime": "1.32.0", "onnxruntime-gpu": "1.31.1"}, "1.31.1", (), None)
    (warning,) = doctor.find_warnings(both, (), choose_kernels(hardware()), "off")
    assert "onnxruntime and onnxruntime-gpu are installed together" in warning
    assert "headrace[cpu] or headrace[cuda]" in warning


def test_two_onnxruntimes_are_found_by_their_files(monkeypatch: pytest.MonkeyPatch) -> None:
    owners = {"onnxruntime": ["onnxruntime-gpu", "onnxruntime", "onnxruntime"]}
    monkeypatch.setattr(doctor.metadata, "packages_distributions", lambda: owners)
    monkeypatch.setattr(doctor.metadata, "version", lambda name: f"version of {name}")
    found = doctor._ort_facts().distributions
    assert found == {name: f"version of {name}" for name in ("onnxruntime", "onnxruntime-gpu")}


def test_without_onnxruntime_the_rest_is_still_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise BackendUnavailableError("onnxruntime cannot be imported; pip install headrace[cpu]")

    monkeypatch.setattr(doctor, "load_onnxruntime", missing)
    facts = doctor._ort_facts()
    assert (facts.version, facts.providers) == (None, ())
    warnings = doctor.find_warnings(facts, (), choose_kernels(hardware()), "off")
    assert warnings == ("onnxruntime cannot be imported; pip install headrace[cpu]",)
    assert "threads      8" in doctor.render(report(onnxruntime=facts, warnings=warnings))


def test_slow_kernels_are_a_warning() -> None:
    kernels = choose_kernels(hardware(features=AVX2_ONLY))
    assert doctor.find_warnings(CPU_ONLY, (), kernels, "off") == (kernels.warning,)
    text = doctor.render(report(hardware(features=AVX2_ONLY), warnings=(kernels.warning,)))
    assert "kernels      avx2, session.x64quantprecision=1" in text
    assert "warnings     this processor has no VNNI" in text


@pytest.mark.parametrize(
    ("environment", "state"),
    [
        ({}, "off"),
        ({"ORT_DISABLE_TELEMETRY": "1"}, "off"),
        ({"ORT_DISABLE_TELEMETRY": "true"}, "off"),
        ({"ORT_DISABLE_TELEMETRY": "0"}, "on"),
        ({"ORT_DISABLE_TELEMETRY": ""}, "on"),
    ],
)
def test_telemetry(environment: dict[str, str], state: str) -> None:
    told = doctor.telemetry_state(environment)
    assert told.startswith(f"{state}: ")
    warnings = doctor.find_warnings(CPU_ONLY, (), choose_kernels(hardware()), told)
    assert len(warnings) == (state == "on")


def test_variables_that_change_how_things_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(doctor._ENVIRONMENT):
            monkeypatch.delenv(name)
    changes = {"ORT_GQA_DISABLE_FLASH_ATTENTION": "1", "OPENBLAS_CORETYPE": "Haswell"}
    for name, value in {**changes, "SECRET_TOKEN": "x"}.items():
        monkeypatch.setenv(name, value)
    assert doctor.relevant_environment(os.environ) == changes
    text = doctor.render(report(environment=changes))
    assert "environment  ORT_GQA_DISABLE_FLASH_ATTENTION=1" in text
    assert "environment  nothing set" in doctor.render(report())


class FakeNvml(SimpleNamespace):
    """Cards, or what goes wrong; of three the first two are linked."""

    class NVMLError(Exception):
        pass

    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0

    def __init__(self, *, init: bool = True, name: bool = True, count: int = 1) -> None:
        super().__init__(shut_down=0)
        self._init, self._name, self._count = init, name, count

    def nvmlInit(self) -> None:  # noqa: N802
        if not self._init:
            raise self.NVMLError("NVML Shared Library Not Found")

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.shut_down += 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self._count

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, kind: int) -> int:  # noqa: N802
        assert kind == self.NVML_P2P_CAPS_INDEX_NVLINK
        return 0 if one + other == 1 else 5

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.1"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        if not self._name:
            raise self.NVMLError("GPU is lost")
        return "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=150_000_000_000, free=149_000_000_000)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:  # noqa: N802
        return 9, 0


def gpu_facts(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml | None) -> GpuFacts:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return doctor._gpu_facts()


def test_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    facts = gpu_facts(monkeypatch, nvml)
    assert facts == GpuFacts(
        (Gpu("NVIDIA H200", "9.0", 150_000_000_000, 149_000_000_000),), "580.1", None
    )
    assert nvml.shut_down == 1
    text = doctor.render(report(gpu=facts))
    assert "gpu          NVIDIA H200, compute capability 9.0, 150.0 GB, 149.0 GB free" in text
    json.dumps(dataclasses.replace(report(), gpu=facts).to_dict())


def test_linked_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = gpu_facts(monkeypatch, FakeNvml(count=3))
    assert [gpu.linked for gpu in facts.gpus] == [(1,), (0,), ()]
    text = doctor.render(report(gpu=facts))
    assert "best use: 2 cards linked by NVLink: tensor parallel" in text


def cards(capability: str, links: list[tuple[int, ...]]) -> list[Gpu]:
    return [Gpu("card", capability, 80, 70 + i, linked) for i, linked in enumerate(links)]


@pytest.mark.parametrize(
    ("machine", "chosen", "reason"),
    [
        ([], (), "no card"),
        (cards("8.9", [()]), (0,), "one card"),
        (cards("9.0", [()]), (0,), "one card"),
        (cards("8.6", [(1,), (0,)]), (1,), "made to work alone"),
        (cards("9.0", [(), ()]), (1,), "no NVLink"),
        (cards("8.0", [(1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)]), (0, 1, 2, 3), "4 cards"),
        (cards("9.0", [(1,), (0,), (3,), (2,)]), (0, 1), "2 cards"),
        (cards("8.9", [()]) + cards("9.0", [(), (0,)]), (2,), "no NVLink"),
    ],
)
def test_what_cards_are_best_used_as(
    machine: list[Gpu], chosen: tuple[int, ...], reason: str
) -> None:
    use = best_use(machine)
    assert use.cards == chosen and reason in use.reason


@pytest.mark.parametrize(
    ("nvml", "note"),
    [
        (None, "nvidia-ml-py is not installed"),
        (FakeNvml(init=False), "none found: NVML Shared Library Not Found"),
        (FakeNvml(name=False), "NVML fails: GPU is lost"),
    ],
)
def test_no_card(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml | None, note: str) -> None:
    facts = gpu_facts(monkeypatch, nvml)
    assert (facts.gpus, facts.driver) == ((), None)
    assert note in (facts.note or "")
