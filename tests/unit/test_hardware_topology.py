"""Names, flags and kinds of cores, read from texts and folders of other machines."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest
from fake_machine import CPUS, write_cores, write_files
from hypothesis import given
from hypothesis import strategies as st

from headrace.runtime.machine import isa_probe, topology
from headrace.runtime.machine.topology import CoreCounts

X86_TEXT = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz
flags\t\t: fpu sse2 avx2 avx512f avx512_vnni amx_tile amx_int8 amx_bf16

processor\t: 1
model name\t: another
flags\t\t: fpu
"""
ARM_TEXT = """processor\t: 0
BogoMIPS\t: 243.75
Features\t: fp asimd asimddp i8mm bf16
CPU implementer\t: 0x41
"""
EIGHT = range(8)
ALL = range(64)


def test_cpuinfo_of_x86() -> None:
    found = topology.parse_cpuinfo(X86_TEXT)
    assert found.vendor == "GenuineIntel"
    assert found.brand == "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz"
    assert {"avx2", "avx512_vnni", "amx_int8"} <= found.flags


def test_cpuinfo_of_arm() -> None:
    found = topology.parse_cpuinfo(ARM_TEXT)
    assert (found.vendor, found.brand) == ("", "")
    assert {"dotprod", "i8mm", "bf16"} <= found.flags


def test_no_cpuinfo(tmp_path: Path) -> None:
    assert topology.read_cpuinfo(tmp_path) == topology.CpuName("", "", frozenset())


@given(st.text())
def test_any_text_is_parsed(text: str) -> None:
    topology.parse_cpuinfo(text)
    topology.parse_cpu_list(text)


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason="there is one reader elsewhere",
)
def test_the_fast_reader_agrees_with_py_cpuinfo() -> None:
    slow, fast = topology.ask_py_cpuinfo(), topology.read_cpuinfo()
    assert (fast.vendor, fast.brand) == (slow.vendor, slow.brand)
    assert fast.flags & set(isa_probe.PROBED) == slow.flags & set(isa_probe.PROBED)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3,8\n", {0, 1, 2, 3, 8}),
        ("5", {5}),
        ("", set()),
        ("3-1", set()),
        ("0-", set()),
        ("-1", set()),
        ("0-3,x", set()),
        ("0-999999999", set()),
    ],
)
def test_cpu_lists(text: str, cpus: set[int]) -> None:
    assert topology.parse_cpu_list(text) == cpus


@given(st.sets(st.integers(0, 300)))
def test_cpu_lists_of_any_processors(cpus: set[int]) -> None:
    assert topology.parse_cpu_list(",".join(map(str, cpus))) == cpus


def test_no_topology(tmp_path: Path) -> None:
    assert topology.count_cores(tmp_path, ALL) is None


def test_hyper_threads_share_a_core(tmp_path: Path) -> None:
    root = write_cores(tmp_path, [[0, 4], [1, 5], [2, 6], [3, 7]])
    assert topology.count_cores(root, ALL) == CoreCounts(8, 4, 4, 4, 4)
    # Affinity with both threads of two cores: two threads are run, not four.
    assert topology.count_cores(root, [0, 4, 1, 5]) == CoreCounts(8, 4, 4, 2, 2)
    assert topology.count_cores(root, [0, 4]) == CoreCounts(8, 4, 4, 1, 1)


def test_siblings_under_their_old_name(tmp_path: Path) -> None:
    files = {f"{CPUS}/cpu{cpu}/topology/thread_siblings_list": "0-1" for cpu in (0, 1)}
    root = write_files(tmp_path, {f"{CPUS}/online": "0-1", **files})
    assert topology.count_cores(root, ALL) == CoreCounts(2, 1, 1, 1, 1)


def test_a_machine_without_sibling_files(tmp_path: Path) -> None:
    root = write_files(tmp_path, {f"{CPUS}/online": "0-3"})
    assert topology.count_cores(root, ALL) == CoreCounts(4, 4, 4, 4, 4)


def hybrid(root: Path) -> Path:
    """Intel: two performance cores with two threads each, four efficient ones."""
    write_cores(root, [[0, 1], [2, 3], [4], [5], [6], [7]])
    write_files(root, {"sys/devices/cpu_core/cpus": "0-3\n", "sys/devices/cpu_atom/cpus": "4-7\n"})
    return root


@pytest.mark.parametrize(
    ("allowed", "physical", "performance"),
    [
        (EIGHT, 6, 2),
        ([0, 1, 4, 5], 3, 1),
        ([4, 5, 6], 3, 3),  # efficient ones only: better than none
    ],
)
def test_hybrid_intel(
    tmp_path: Path, allowed: range | list[int], physical: int, performance: int
) -> None:
    counts = topology.count_cores(hybrid(tmp_path), allowed)
    assert counts == CoreCounts(8, 6, 2, physical, performance)


def test_big_and_little_by_frequency(tmp_path: Path) -> None:
    """Arm: one prime, three big and four little cores; the prime one is only a little faster."""
    khz = {0: 1_800_000, 1: 1_800_000, 2: 1_800_000, 3: 1_800_000}
    khz |= {4: 2_800_000, 5: 2_800_000, 6: 2_800_000, 7: 3_200_000}
    root = write_cores(tmp_path, [[cpu] for cpu in EIGHT], khz)
    assert topology.count_cores(root, ALL) == CoreCounts(8, 8, 4, 8, 4)


def test_turbo_bins_are_no_kinds(tmp_path: Path) -> None:
    khz = {cpu: 4_500_000 + 50_000 * cpu for cpu in EIGHT}
    root = write_cores(tmp_path, [[cpu] for cpu in EIGHT], khz)
    assert topology.count_cores(root, ALL) == CoreCounts(8, 8, 8, 8, 8)


def test_offline_processors_do_not_count(tmp_path: Path) -> None:
    root = write_cores(tmp_path, [[0], [1], [2], [3]])
    write_files(root, {f"{CPUS}/online": "0-2", "sys/devices/cpu_core/cpus": "0-3"})
    assert topology.count_cores(root, ALL) == CoreCounts(3, 3, 3, 3, 3)


def test_numa_nodes(tmp_path: Path) -> None:
    assert topology.count_numa_nodes(tmp_path) == 1
    nodes = {"node0": "0-3", "node1": "4-7", "node2": "\n"}  # the last has memory only
    files = {f"sys/devices/system/node/{name}/cpulist": text for name, text in nodes.items()}
    assert topology.count_numa_nodes(write_files(tmp_path, files)) == 2
