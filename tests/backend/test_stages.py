"""Stages one after the other give the bits of the whole graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architectures import write_model
from backend_driver import Schedule, ragged_schedule, run_schedule
from hypothesis import given
from hypothesis import strategies as st
from tiny import write_tiny_llama

from headrace.exporters.package import export_package
from headrace.exporters.stages import balanced
from headrace.runtime.api import Runtime
from headrace.runtime.errors import ConfigError, PackageError
from headrace.runtime.manifest import INPUT_IDS, LOGITS, LOGITS_INDEX, read_manifest

LENGTHS = (1, 30, 22, 40)
# Norms before, after and both; learned positions; tables of positions that the graph counts.
ARCHITECTURES = ("olmo2", "gemma2", "gpt2", "phi3_partial_longrope")
WHOLE: Schedule = [[(i, 0, n) for i, n in enumerate(LENGTHS)]]


def sequences() -> list[list[int]]:
    rng = np.random.default_rng(4)
    return [rng.integers(3, 253, length).tolist() for length in LENGTHS]


def assert_stages_are_the_whole(package: Path, stages: int, schedule: Schedule, form: str) -> None:
    """Logits and entropies, bit for bit."""
    one = run_schedule(package, sequences(), schedule, form=form)
    several = run_schedule(package, sequences(), schedule, form=form, stages=stages)
    for expected, actual in zip((*one[0], *one[1]), (*several[0], *several[1]), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize(
    "options",
    [{"precision": "fp32", "kv_cache": "fp32"}, {"precision": "w8a8_row", "kv_cache": "int8"}],
    ids=lambda options: options["precision"],
)
def test_stages_are_the_whole(stages: int, options: dict[str, Any], tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "hf", layers=4, tied=stages == 2)
    export_package(source, tmp_path / "package", stages=stages, **options)
    steps = ragged_schedule(LENGTHS, np.random.default_rng(5))
    for form in ("ragged", "uniform"):
        assert_stages_are_the_whole(tmp_path / "package", stages, steps, form)
    if options["kv_cache"] == "int8":
        together, _ = run_schedule(tmp_path / "package", sequences(), steps, stages=stages)
        for tokens, logits in zip(sequences(), together, strict=True):
            alone, _ = run_schedule(
                tmp_path / "package", [tokens], [[(0, 0, len(tokens))]], stages=stages
            )
            np.testing.assert_array_equal(logits, alone[0])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_kind_of_layer_can_be_a_stage(name: str, tmp_path: Path) -> None:
    source = write_model(name, tmp_path / "hf")
    export_package(source, tmp_path / "package", precision="fp32", kv_cache="fp32", stages=2)
    assert_stages_are_the_whole(tmp_path / "package", 2, WHOLE, "ragged")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    source = write_tiny_llama(folder / "hf", layers=4)
    export_package(source, folder / "package", precision="fp32", kv_cache="fp32", stages=3)
    return folder / "package"


def test_the_manifest_says_what_crosses(package: Path) -> None:
    graph = read_manifest(package).targets[0].graphs[0]
    first, second, third = graph.stages
    assert [INPUT_IDS in stage.inputs for stage in graph.stages] == [True, False, False]
    assert [LOGITS_INDEX in stage.inputs for stage in graph.stages] == [False, False, True]
    assert first.outputs == second.inputs[:2] and second.outputs == third.inputs[:2]
    assert third.outputs == graph.outputs and LOGITS in third.outputs
    (package / third.file).unlink()
    with pytest.raises(PackageError, match="missing"):
        read_manifest(package)


@pytest.mark.parametrize("stages", [2, 4])
def test_a_number_of_stages_that_was_not_exported_is_refused(stages: int, tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "hf", layers=3)
    export_package(source, tmp_path / "package", precision="fp32", kv_cache="fp32", stages=3)
    with pytest.raises(ConfigError, match=f"stages={stages}.*1 or 3.*--stages"):
        Runtime.load(tmp_path / "package", stages=stages)
    with pytest.raises(ConfigError, match="stages"):
        export_package(source, tmp_path / "other", precision="fp32", stages=stages + 2)
    with pytest.raises(ConfigError, match="stages"):
        export_package(source, tmp_path / "other", stages=3, tensor_parallel=2)


@given(
    costs=st.lists(st.integers(0, 9), min_size=1, max_size=7),
    last_cost=st.integers(0, 30),
    data=st.data(),
)
def test_parts_are_balanced(costs: list[int], last_cost: int, data: st.DataObject) -> None:
    """As cheap at its dearest as the best of all ways to cut."""
    count = data.draw(st.integers(1, len(costs)))

    def dearest(ranges: list[range]) -> int:
        sums = [sum(costs[i] for i in part) for part in ranges]
        return max([*sums[:-1], sums[-1] + last_cost])

    def ways(start: int, parts: int) -> list[list[range]]:
        if parts == 1:
            return [[range(start, len(costs))]]
        return [
            [range(start, stop), *rest]
            for stop in range(start + 1, len(costs) - parts + 2)
            for rest in ways(stop, parts - 1)
        ]

    found = balanced(costs, last_cost, count)
    assert all(found) and [i for part in found for i in part] == list(range(len(costs)))
    assert dearest(found) == min(dearest(way) for way in ways(0, count))
