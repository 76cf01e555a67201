"""Instructions are executed in children: what survives is believed."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.runtime.machine import isa_probe
from headrace.runtime.machine.isa_probe import ProbeResult

needs_probes = pytest.mark.skipif(
    isa_probe.obstacle() is not None, reason="instructions cannot be executed here"
)

# mov eax,1; ret / ud2: no such instruction / jmp to itself
ONE, REFUSED, ENDLESS = "b801000000c3", "0f0b", "ebfe"
ROUTINES = {
    "works": (ONE, 1),
    "refused": (REFUSED, 1),
    "wrong": (ONE, 2),
    "amx_untouched": (ONE, 1),
    "works_too": (ONE, 1),
}


def use_routines(monkeypatch: pytest.MonkeyPatch, routines: dict[str, tuple[str, int]]) -> None:
    monkeypatch.setattr(isa_probe, "_CODE", routines)
    monkeypatch.setattr(isa_probe, "PROBED", tuple(routines))


@needs_probes
def test_what_dies_or_computes_something_else_does_not_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_routines(monkeypatch, {k: v for k, v in ROUTINES.items() if not k.startswith("amx")})
    assert isa_probe.probe(isa_probe.PROBED) == (
        ProbeResult("works", True),
        ProbeResult("refused", False),
        ProbeResult("wrong", False),
        ProbeResult("works_too", True),
    )


@needs_probes
def test_what_does_not_end_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    use_routines(monkeypatch, {"works": (ONE, 1), "endless": (ENDLESS, 1)})
    monkeypatch.setattr(isa_probe, "_TIMEOUT_S", 1.0)
    found = isa_probe.probe(isa_probe.PROBED)
    assert found == (ProbeResult("works", True), ProbeResult("endless", None))


@needs_probes
def test_only_what_is_listed_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    use_routines(monkeypatch, ROUTINES)
    assert isa_probe.probe({"works", "sse2"}) == (ProbeResult("works", True),)
    assert isa_probe.probe(()) == ()


@needs_probes
@pytest.mark.skipif(sys.platform != "linux", reason="core dumps are switched off on Linux")
def test_a_refused_instruction_leaves_no_core_dump(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import resource

    use_routines(monkeypatch, {"refused": (REFUSED, 1)})
    monkeypatch.chdir(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    try:
        assert isa_probe.probe(isa_probe.PROBED) == (ProbeResult("refused", False),)
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


@needs_probes
def test_probes_agree_with_numpy() -> None:
    """numpy asks the CPUID instruction and the operating system's enabled registers."""
    known = np._core._multiarray_umath.__cpu_features__  # type: ignore[attr-defined]
    names = {"avx2": "AVX2", "avx512f": "AVX512F", "avx512_vnni": "AVX512VNNI"}
    names = {feature: name for feature, name in names.items() if name in known}
    found = isa_probe.probe(names)
    assert {probe.feature: probe.works for probe in found} == {
        feature: known[name] for feature, name in names.items()
    }


class ScriptedChildren:
    """Stands in for children: the features of `deadly` kill one, `hanging` ones stop it."""

    def __init__(self, truth: dict[str, str]) -> None:
        self.truth, self.started = truth, 0

    def run(self, features: Sequence[str]) -> tuple[str, bool]:
        self.started += 1
        written = ""
        for name in features:
            written += f"{name} "
            if self.truth[name] == "dies":
                return written, True
            if self.truth[name] == "hangs":
                return written, False
            written += {"works": "1", "wrong": "0", "untriable": "-"}[self.truth[name]] + "\n"
        return written, True


@given(
    st.dictionaries(
        st.sampled_from(isa_probe.PROBED),
        st.sampled_from(["works", "wrong", "untriable", "dies", "hangs"]),
    )
)
def test_each_death_costs_one_more_child(truth: dict[str, str]) -> None:
    children = ScriptedChildren(truth)
    expected = {"works": True, "wrong": False, "dies": False, "untriable": None, "hangs": None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isa_probe, "_run_child", children.run)
        patch.setattr(isa_probe, "obstacle", lambda: None)
        found = isa_probe.probe(truth)
    assert {probe.feature: probe.works for probe in found} == {
        name: expected[outcome] for name, outcome in truth.items()
    }
    names = [name for name in isa_probe.PROBED if name in truth]
    ends = sum(truth[name] in ("dies", "hangs") for name in names)
    last_ends = bool(names) and truth[names[-1]] in ("dies", "hangs")
    assert children.started == (ends + (not last_ends) if names else 0)


@given(st.text(), st.booleans())
def test_whatever_a_child_writes_probing_ends(written: str, ended: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isa_probe, "_run_child", lambda features: (written, ended))
        patch.setattr(isa_probe, "obstacle", lambda: None)
        assert len(isa_probe.probe(isa_probe.PROBED)) == len(isa_probe.PROBED)


def test_an_app_is_not_started_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a frozen app, or one that embeds Python, sys.executable is the app itself."""

    def started(*_: object, **__: object) -> None:
        raise AssertionError("a child was started")

    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(isa_probe.subprocess, "Popen", started)
    monkeypatch.delenv(isa_probe.SKIP_VARIABLE, raising=False)
    unknown = (ProbeResult("avx2", None), ProbeResult("amx_int8", None))
    listed = frozenset({"avx2", "amx_int8", "sse2"})
    for executable in (str(Path("apps") / "studio"), "", None):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", executable)
            assert isa_probe.probe(listed) == unknown
    with monkeypatch.context() as patch:
        patch.setattr(sys, "frozen", True, raising=False)
        assert isa_probe.probe(listed) == unknown
    with monkeypatch.context() as patch:
        patch.setenv(isa_probe.SKIP_VARIABLE, "1")
        assert isa_probe.probe(listed) == unknown
        assert isa_probe.SKIP_VARIABLE in (isa_probe.obstacle() or "")
    with monkeypatch.context() as patch:
        patch.setattr(platform, "machine", lambda: "aarch64")
        assert isa_probe.probe(frozenset({"dotprod"})) == ()
        assert "aarch64" in (isa_probe.obstacle() or "")


def test_a_child_that_cannot_be_started_tells_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(isa_probe, "obstacle", lambda: None)
    for program in (tmp_path / "missing", Path(os.devnull)):
        monkeypatch.setattr(sys, "executable", str(program))
        assert isa_probe.probe({"avx2"}) == (ProbeResult("avx2", None),)


def test_flags_are_believed_unless_they_fail_and_amx_only_if_it_works() -> None:
    flags = frozenset({"sse2", "avx2", "avx512f", "amx_int8", "amx_bf16"})
    results = (
        ProbeResult("avx2", None),
        ProbeResult("avx512f", False),
        ProbeResult("avx512_vnni", True),  # not listed: there is no list on Windows
        ProbeResult("amx_int8", None),
        ProbeResult("amx_bf16", True),
    )
    expected = {"sse2", "avx2", "avx512_vnni", "amx_bf16"}
    assert isa_probe.believed(flags, results) == expected
