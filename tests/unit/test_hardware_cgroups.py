"""Limits of control groups, read from folders that look like /proc and /sys."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from fake_machine import GIB, write_files
from hypothesis import given
from hypothesis import strategies as st

from headrace.runtime.machine import cgroups

V2_FILES = ("cpu.max", "memory.max", "memory.current", "memory.stat")


def v2(root: Path, path: str, levels: dict[str, dict[str, str]]) -> Path:
    """A v2 hierarchy; `levels`: files by group path."""
    files = {"proc/self/cgroup": f"0::{path}\n"}
    for group, content in levels.items():
        folder = f"sys/fs/cgroup{group}".rstrip("/")
        files |= {f"{folder}/{name}": text for name, text in content.items()}
    return write_files(root, files)


def test_no_cgroups_no_limit(tmp_path: Path) -> None:
    assert cgroups.cpu_quota_cores(tmp_path) is None
    assert cgroups.memory_limit_bytes(tmp_path) is None
    assert cgroups.memory_available_bytes(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("max 100000", None),
        ("150000 100000", 1.5),
        ("50000 100000", 0.5),
        ("200000 50000", 4.0),
        ("100000 0", None),
        ("", None),
        ("nonsense here", None),
    ],
)
def test_v2_quota(tmp_path: Path, text: str, cores: float | None) -> None:
    v2(tmp_path, "/app", {"/app": {"cpu.max": text}})
    assert cgroups.cpu_quota_cores(tmp_path) == cores


@pytest.mark.parametrize("tight", ["/a/b/c", "/a/b", "/a", ""])
def test_the_least_quota_on_the_path_counts(tmp_path: Path, tight: str) -> None:
    levels = {group: {"cpu.max": "800000 100000\n"} for group in ("/a/b/c", "/a/b", "/a", "")}
    levels[tight] = {"cpu.max": "250000 100000\n"}
    levels["/a/other"] = {"cpu.max": "100000 100000\n"}
    v2(tmp_path, "/a/b/c", levels)
    assert cgroups.cpu_quota_cores(tmp_path) == 2.5


def test_a_container_sees_its_limit_at_the_mount(tmp_path: Path) -> None:
    """Without a cgroup namespace the path is the host's, and leads nowhere."""
    limits = {"cpu.max": "100000 100000\n", "memory.max": f"{GIB}\n"}
    v2(tmp_path, "/docker/0123abcd", {"": limits})
    assert cgroups.cpu_quota_cores(tmp_path) == 1.0
    assert cgroups.memory_limit_bytes(tmp_path) == GIB


@pytest.mark.parametrize("folder", ["cpu,cpuacct", "cpu"])
def test_v1(tmp_path: Path, folder: str) -> None:
    write_files(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/pod/app\n4:cpu,cpuacct:/pod/app\n0::/\n",
            f"sys/fs/cgroup/{folder}/pod/app/cpu.cfs_quota_us": "-1\n",
            f"sys/fs/cgroup/{folder}/pod/app/cpu.cfs_period_us": "100000\n",
            f"sys/fs/cgroup/{folder}/pod/cpu.cfs_quota_us": "300000\n",
            f"sys/fs/cgroup/{folder}/pod/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/pod/app/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/pod/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/pod/memory.usage_in_bytes": f"{3 * GIB}\n",
            "sys/fs/cgroup/memory/pod/memory.stat": (
                f"inactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file {GIB // 2}\n"
            ),
        },
    )
    assert cgroups.cpu_quota_cores(tmp_path) == 3.0
    assert cgroups.memory_limit_bytes(tmp_path) == 4 * GIB
    assert cgroups.memory_available_bytes(tmp_path) == 2.5 * GIB


def test_v1_beside_v2(tmp_path: Path) -> None:
    """The hybrid layout mounts v2 below v1."""
    write_files(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpu:/\n0::/user\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/unified/user/memory.max": f"{GIB}\n",
        },
    )
    assert cgroups.cpu_quota_cores(tmp_path) == 4.0
    assert cgroups.memory_limit_bytes(tmp_path) == GIB


def test_memory_left_is_the_least_over_the_levels(tmp_path: Path) -> None:
    """A neighbour in the same parent group uses up what the parent may have."""
    levels = {
        "/pod/app": {"memory.max": f"{6 * GIB}", "memory.current": f"{1 * GIB}"},
        "/pod": {"memory.max": f"{8 * GIB}", "memory.current": f"{7 * GIB}"},
        "": {"memory.max": "max"},
    }
    v2(tmp_path, "/pod/app", levels)
    assert cgroups.memory_limit_bytes(tmp_path) == 6 * GIB
    assert cgroups.memory_available_bytes(tmp_path) == GIB


def test_file_cache_is_not_used_memory(tmp_path: Path) -> None:
    """Memory-mapped weights are charged to the group, and can be given back."""
    files = {
        "memory.max": f"{4 * GIB}",
        "memory.current": f"{4 * GIB}",
        "memory.stat": f"anon {GIB}\nfile {3 * GIB}\ninactive_file {2 * GIB}\nactive_file {GIB}\n",
    }
    v2(tmp_path, "/app", {"/app": files})
    assert cgroups.memory_available_bytes(tmp_path) == 3 * GIB


def test_more_used_than_allowed_leaves_nothing(tmp_path: Path) -> None:
    files = {"memory.max": f"{GIB}", "memory.current": f"{2 * GIB}"}
    v2(tmp_path, "/app", {"/app": files})
    assert cgroups.memory_available_bytes(tmp_path) == 0


@given(
    cgroup=st.one_of(st.text(max_size=40), st.from_regex(r"0::(/[a.]{0,3}){0,3}\n")),
    contents=st.fixed_dictionaries(
        {name: st.one_of(st.text(max_size=30), st.just("9" * 5000)) for name in V2_FILES}
    ),
)
def test_whatever_the_files_hold_nothing_is_raised(cgroup: str, contents: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        files = {f"sys/fs/cgroup/{name}": text for name, text in contents.items()}
        write_files(root, {"proc/self/cgroup": cgroup.replace("\0", "0"), **files})
        quota, limit = cgroups.cpu_quota_cores(root), cgroups.memory_limit_bytes(root)
        left = cgroups.memory_available_bytes(root)
        assert quota is None or quota >= 0
        assert (limit is None) == (left is None)
        assert left is None or left >= 0
