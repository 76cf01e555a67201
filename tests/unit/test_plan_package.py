"""Ways to run a package: which there are, which is taken, and that they can be loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import write_tiny_llama

from headrace.exporters.package import export_package
from headrace.runtime import Runtime, cli
from headrace.runtime.config import EngineConfig
from headrace.runtime.planning.candidates import TIE_SHARE, Candidate, candidates, choose


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 9))
def test_candidates_are_configurations(stages: int, cores: int, sequences: int) -> None:
    found = candidates(["cuda", "cpu"], stages, cores, sequences)
    assert len(set(found)) == len(found)
    for way in found:
        EngineConfig.from_dict(way.options())
        assert way.micro_batches <= sequences and way.num_threads <= cores
    plain = [way for way in found if way.stages == 1]
    assert {way.device for way in plain} == {"cuda", "cpu"}
    assert {way.pipeline_depth for way in plain} == {1, 2}


def test_stages_side_by_side_are_tried_where_each_has_a_thread() -> None:
    def parts(cores: int) -> set[tuple[int, int]]:
        return {(c.stages, c.micro_batches) for c in candidates(["cpu"], 2, cores, 4)}

    assert parts(2) == {(1, 1), (2, 1), (2, 2), (2, 4)}
    assert parts(1) == {(1, 1), (2, 1)}


@given(st.lists(st.floats(1, 100), min_size=1, max_size=6))
def test_the_first_of_equals_is_chosen(speeds: list[float]) -> None:
    ways = {Candidate("cpu", number + 1): speed for number, speed in enumerate(speeds)}
    chosen = choose(ways)
    least = max(speeds) * (1 - TIE_SHARE)
    assert ways[chosen] >= least
    assert all(ways[way] < least for way in list(ways)[: list(ways).index(chosen)])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_tiny_llama(tmp_path / "hf", layers=2)
    package = tmp_path / "p"
    export_package(source, package, precision="fp32", kv_cache="fp32", stages=2, forms=("ragged",))
    assert cli.main(["plan", str(package), "--sequences", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n* cpu") == 1 and "2 sequences decoded together" in printed
    assert cli.main(["plan", str(package), "--sequences", "2", "--json"]) == 0
    ways = json.loads(capsys.readouterr().out)["ways"]
    assert {way["stages"] for way in ways["candidates"]} == {1, 2}
    best = ways["best"]
    assert any(best.items() <= way.items() for way in ways["candidates"])
    with Runtime.load(package, **best) as runtime:
        assert len(runtime.generate([5, 6], max_new_tokens=3, ignore_eos=True).token_ids) == 3
