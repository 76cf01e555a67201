"""What is put together from topology, cgroups and probes, and what the CPU backend makes of it."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path

import psutil
import pytest
from fake_machine import GIB, hardware, write_cores, write_files
from hypothesis import given
from hypothesis import strategies as st

from headrace.backends.cpu_avx512.threads import choose_kernels, choose_threads
from headrace.runtime.errors import ConfigError
from headrace.runtime.machine import hardware as module
from headrace.runtime.machine import isa_probe, topology
from headrace.runtime.machine.hardware import HardwareInfo, probe_hardware
from headrace.runtime.machine.isa_probe import ProbeResult
from headrace.runtime.machine.topology import CpuName


def test_this_machine() -> None:
    found = probe_hardware()
    assert found.machine == platform.machine()
    assert 1 <= found.usable_cores <= found.physical_cores <= found.logical_cores
    assert 1 <= found.allowed_cores <= found.logical_cores
    assert found.allowed_performance_cores <= found.allowed_physical_cores <= found.allowed_cores
    assert 0 < found.available_memory_bytes <= found.total_memory_bytes
    assert found.numa_nodes >= 1
    if isa_probe.obstacle() is None:
        assert all(probe.works is not None for probe in found.probes)


def pretend_memory(monkeypatch: pytest.MonkeyPatch, total: int, available: int) -> None:
    memory = type("Memory", (), {"total": total, "available": available})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def test_a_container_on_a_large_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """64 cores and 512 GiB, of which the container has 2.5 cores and 4 GiB."""
    write_cores(tmp_path, [[core, core + 64] for core in range(64)])
    write_files(
        tmp_path,
        {
            "proc/cpuinfo": "model name : Some Xeon\nflags : sse2\n",
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/cpu.max": "250000 100000\n",
            "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{GIB}\n",
        },
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(128)), raising=False)
    pretend_memory(monkeypatch, 512 * GIB, 400 * GIB)
    found = probe_hardware(tmp_path)
    assert (found.logical_cores, found.physical_cores, found.allowed_cores) == (128, 64, 128)
    assert found.usable_cores == 3
    assert (found.total_memory_bytes, found.available_memory_bytes) == (4 * GIB, 3 * GIB)
    assert choose_threads(found, None).reason == "the cgroup's quota is 2.5 cores"


def test_a_host_short_of_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A generous limit does not make memory that the machine has not got."""
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{64 * GIB}\n"}
    write_files(tmp_path, {"proc/cpuinfo": "flags : sse2\n", **files})
    pretend_memory(monkeypatch, 32 * GIB, 2 * GIB)
    found = probe_hardware(tmp_path)
    assert (found.total_memory_bytes, found.available_memory_bytes) == (32 * GIB, 2 * GIB)


def test_flags_that_fail_are_no_features(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_files(tmp_path, {"proc/cpuinfo": "flags : sse2 avx512_vnni amx_int8\n"})
    outcome = (ProbeResult("avx512_vnni", True), ProbeResult("amx_int8", False))
    monkeypatch.setattr(isa_probe, "probe", lambda _: outcome)
    found = probe_hardware(tmp_path)
    assert found.flags == {"sse2", "avx512_vnni", "amx_int8"}
    assert found.features == {"sse2", "avx512_vnni"}
    assert found.probes == outcome


def no_py_cpuinfo() -> CpuName:
    raise AssertionError("py-cpuinfo was asked, which takes a second")


@pytest.mark.parametrize("machine", ["AMD64", "x86_64"])
def test_without_a_list_of_flags_all_are_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: str
) -> None:
    """Windows and macOS."""
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(isa_probe, "obstacle", lambda: None)
    monkeypatch.setattr(
        isa_probe, "probe", lambda names: tuple(ProbeResult(n, True) for n in names)
    )
    monkeypatch.setattr(topology, "ask_py_cpuinfo", no_py_cpuinfo)
    assert probe_hardware(tmp_path).features == set(isa_probe.PROBED)


def test_py_cpuinfo_is_asked_where_nothing_else_tells(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A frozen app on Windows."""
    listed = CpuName("GenuineIntel", "Some Core", frozenset({"avx2", "avx_vnni", "amx_int8"}))
    monkeypatch.setattr(platform, "machine", lambda: "AMD64")
    monkeypatch.setattr(isa_probe, "obstacle", lambda: "frozen")
    monkeypatch.setattr(topology, "ask_py_cpuinfo", lambda: listed)
    found = probe_hardware(tmp_path)
    assert found.features == {"avx2", "avx_vnni"}
    assert choose_kernels(found).name == "vnni"


def test_arm_needs_no_probes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_files(tmp_path, {"proc/cpuinfo": "Features : fp asimd asimddp\n"})
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(topology, "ask_py_cpuinfo", no_py_cpuinfo)
    found = probe_hardware(tmp_path)
    assert (found.features, found.probes) == ({"fp", "asimd", "dotprod"}, ())


def test_without_sys_psutil_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Windows and macOS: physical cores from psutil; or all where that does not know either."""
    monkeypatch.setattr(topology, "ask_py_cpuinfo", lambda: CpuName("", "", frozenset()))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(module, "_allowed_cpus", lambda: frozenset(range(8)))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 4)
    found = probe_hardware(tmp_path)
    assert (found.logical_cores, found.physical_cores, found.usable_cores) == (8, 4, 4)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: None)
    assert probe_hardware(tmp_path).usable_cores == 8
    monkeypatch.setattr(module, "_allowed_cpus", lambda: frozenset({5}))
    assert probe_hardware(tmp_path).usable_cores == 1


@pytest.mark.parametrize(
    ("changes", "threads", "reason"),
    [
        ({}, 8, "one for each of 8 physical cores, no hyper-threads"),
        ({"logical_cores": 8, "allowed_cores": 8}, 8, "one for each of 8 cores"),
        (
            {"performance_cores": 2, "allowed_performance_cores": 2},
            2,
            "2 performance cores of 8 cores",
        ),
        (
            {"allowed_cores": 2, "allowed_physical_cores": 1, "allowed_performance_cores": 1},
            1,
            "affinity leaves 1 physical core of 8",
        ),
        ({"quota_cores": 1.5}, 2, "the cgroup's quota is 1.5 cores"),
        ({"quota_cores": 0.1}, 1, "the cgroup's quota is 0.1 cores"),
        ({"quota_cores": 64.0}, 8, "one for each of 8 physical cores, no hyper-threads"),
    ],
)
def test_threads_and_the_limit_that_decided(
    changes: dict[str, object], threads: int, reason: str
) -> None:
    choice = choose_threads(hardware(**changes), None)
    assert (choice.num_threads, choice.reason) == (threads, reason)


def test_hyper_threads_can_be_asked_for() -> None:
    assert choose_threads(hardware(), 16).num_threads == 16


@pytest.mark.parametrize(
    ("changes", "requested", "message"),
    [
        ({}, 17, "expected 1 to 16 (16 logical cores left by affinity), or None"),
        ({"allowed_cores": 1}, 2, "expected 1 to 1 (1 logical core left by affinity), or None"),
        ({"quota_cores": 2.5}, 4, "expected 1 to 3 (the cgroup's quota is 2.5 cores), or None"),
        ({}, 0, "expected 1 to 16"),
    ],
)
def test_more_threads_than_allowed_are_refused(
    changes: dict[str, object], requested: int, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_threads(hardware(**changes), requested)
    assert f"num_threads={requested}" in str(caught.value)
    assert message in str(caught.value)


@st.composite
def machines(draw: st.DrawFn) -> HardwareInfo:
    logical = draw(st.integers(1, 256))
    physical = draw(st.integers(1, logical))
    allowed = draw(st.integers(1, logical))
    allowed_physical = draw(st.integers(1, min(allowed, physical)))
    return hardware(
        logical_cores=logical,
        physical_cores=physical,
        performance_cores=draw(st.integers(1, physical)),
        allowed_cores=allowed,
        allowed_physical_cores=allowed_physical,
        allowed_performance_cores=draw(st.integers(1, allowed_physical)),
        quota_cores=draw(st.none() | st.floats(0, 300)),
    )


@given(machines(), st.none() | st.integers(-1, 300))
def test_never_more_threads_than_allowed_and_never_none(
    found: HardwareInfo, requested: int | None
) -> None:
    quota = math.inf if found.quota_cores is None else math.ceil(found.quota_cores)
    allowed = max(1, min(found.allowed_cores, quota))
    assert 1 <= choose_threads(found, None).num_threads <= min(allowed, found.physical_cores)
    if requested is not None and 1 <= requested <= allowed:
        assert choose_threads(found, requested).num_threads == requested
    elif requested is not None:
        with pytest.raises(ConfigError):
            choose_threads(found, requested)


@pytest.mark.parametrize(
    ("features", "name"),
    [
        ({"avx2", "avx512_vnni", "amx_int8"}, "amx"),
        ({"avx2", "avx512_vnni"}, "vnni"),
        ({"avx2", "avx_vnni"}, "vnni"),
    ],
)
def test_processors_with_integer_products(features: set[str], name: str) -> None:
    choice = choose_kernels(hardware(features=frozenset(features)))
    assert (choice.name, choice.session_options, choice.warning) == (name, {}, None)


@pytest.mark.parametrize(
    ("features", "name"),
    [
        ({"avx2"}, "avx2"),
        ({"avx2", "avx512f"}, "avx2"),
        ({"amx_bf16"}, "x86-64"),
        (set(), "x86-64"),
    ],
)
def test_processors_that_would_saturate(features: set[str], name: str) -> None:
    choice = choose_kernels(hardware(features=frozenset(features)))
    assert choice.name == name
    assert choice.session_options == {"session.x64quantprecision": "1"}
    assert choice.warning


def test_weights_of_reduced_range_do_not_saturate() -> None:
    plain = hardware(features=frozenset({"avx2"}))
    choice = choose_kernels(plain, {"w7a8_row", "fp32"})
    assert (choice.name, choice.session_options, choice.warning) == ("avx2", {}, None)
    assert choose_kernels(plain, {"w7a8_row", "w8a8_row"}).session_options


@pytest.mark.parametrize(
    ("features", "exact"), [({"avx512_vnni"}, True), ({"avx_vnni"}, False), ({"avx2"}, False)]
)
def test_4_bits_are_exact_with_avx512_only(features: set[str], exact: bool) -> None:
    assert choose_kernels(hardware(features=frozenset(features))).exact_4bit is exact


def test_other_architectures_do_not_saturate() -> None:
    choice = choose_kernels(hardware(machine="arm64", features=frozenset()))
    assert (choice.name, choice.session_options, choice.warning) == ("arm64", {}, None)
