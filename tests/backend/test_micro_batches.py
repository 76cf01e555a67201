"""Stages side by side against one after the other: the same bits, tokens and errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_driver import drive, ragged_schedule, run_schedule
from engine_samples import Answers, run_arrivals, run_to_end
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import write_tiny_llama

from headrace.backends.cpu_avx512.backend import CpuBackend
from headrace.backends.cpu_avx512.layout import BoundStep
from headrace.backends.registry import create_backend
from headrace.exporters.package import export_package
from headrace.runtime.config import EngineConfig, GenerationConfig
from headrace.runtime.engine import Engine
from headrace.runtime.errors import BackendError, ConfigError
from headrace.runtime.machine.hardware import probe_hardware
from headrace.runtime.manifest import read_manifest

LENGTHS = (1, 30, 22, 40, 17)
EOS = 2
ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 10),
        st.lists(st.integers(3, 250), min_size=1, max_size=40),
        st.builds(
            GenerationConfig,
            max_new_tokens=st.integers(1, 10),
            temperature=st.sampled_from([0.0, 0.8]),
            seed=st.integers(0, 9),
            n=st.integers(1, 2),
        ),
    ),
    min_size=1,
    max_size=5,
)


class Codes:
    """Text of token ids."""

    stopped = None

    def __init__(self, config: GenerationConfig) -> None:
        del config

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join(map(chr, token_ids))

    def finish(self) -> str:
        return ""

    def take_calls(self) -> tuple[()]:
        return ()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In two stages, with an INT8 cache: rows are exact."""
    folder = tmp_path_factory.mktemp("micro")
    source = write_tiny_llama(folder / "hf", layers=4)
    export_package(source, folder / "p", precision="w8a8_row", kv_cache="int8", stages=2)
    return folder / "p"


def backend_of(package: Path, **options: Any) -> CpuBackend:
    config = EngineConfig.from_dict({"num_threads": 1, "max_sequences": 5, **options})
    made = create_backend("cpu", package, read_manifest(package), config, probe_hardware())
    assert isinstance(made, CpuBackend)
    return made


@pytest.mark.parametrize("form", ["ragged", "uniform"])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_side_by_side_gives_the_bits_of_in_turn(package: Path, form: str, count: int) -> None:
    rng = np.random.default_rng(4)
    sequences = [rng.integers(3, 253, length).tolist() for length in LENGTHS]
    schedule = ragged_schedule(LENGTHS, np.random.default_rng(5))
    in_turn = run_schedule(package, sequences, schedule, form=form, stages=2)
    backend = backend_of(package, form=form, stages=2, micro_batches=count)
    side_by_side = drive(backend, sequences, schedule)
    for expected, actual in zip(chain(*in_turn), chain(*side_by_side), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_pieces_of_a_long_row_wait_for_each_other(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the same shape, and so the same buffers."""
    monkeypatch.setattr("headrace.backends.cpu_avx512.calls.MAX_SCORE_BYTES", 1)
    sequence = np.random.default_rng(6).integers(3, 253, 128).tolist()
    whole, _ = run_schedule(package, [sequence], [[(0, 0, 128)]], stages=2)
    found, _ = drive(backend_of(package, stages=2, micro_batches=2), [sequence], [[(0, 0, 128)]])
    np.testing.assert_array_equal(found[0], whole[0])


@pytest.fixture(scope="module")
def engines(package: Path) -> Iterator[tuple[Engine, Engine]]:
    made = []
    for options in ({}, {"stages": 2, "micro_batches": 2}):
        config = EngineConfig(max_sequences=4, max_chunk_tokens=16, num_threads=1, **options)
        made.append(Engine(backend_of(package, **config.to_dict()), Codes, [EOS], config))
    yield made[0], made[1]
    for engine in made:
        engine.close()


@settings(deadline=None, max_examples=15)
@given(arrivals=ARRIVALS, cancel_at=st.one_of(st.none(), st.integers(0, 8)))
def test_answers_are_the_plain_ones(
    engines: tuple[Engine, Engine], arrivals: list[Any], cancel_at: int | None
) -> None:
    """Whoever comes, is cancelled, interrupted or guessed ahead for."""
    plain, piped = engines
    assert run_arrivals(piped, arrivals, cancel_at) == run_arrivals(plain, arrivals, cancel_at)


def test_a_stage_that_fails_ends_its_step_alone(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(max_sequences=4, num_threads=1, stages=2, micro_batches=2)
    engine = Engine(backend_of(package, **config.to_dict()), Codes, [EOS], config)
    options = GenerationConfig(max_new_tokens=8, ignore_eos=True)
    requests = [engine.prepare([5 + n, 6, 7], options) for n in range(4)]
    for request in requests:
        engine.add(request)
    answers = Answers()
    for _ in range(3):
        answers.take(engine.step())

    def fails(step: BoundStep, number: int) -> None:
        if number == 1:
            raise RuntimeError("an operator failed")

    with monkeypatch.context() as patch:
        patch.setattr(BoundStep, "run_stage", fails)
        answers.take(engine.step())
    assert answers.errors.keys() == set(requests)
    assert all(isinstance(e, BackendError) for e in answers.errors.values())
    assert "running stage 1 failed" in str(answers.errors[requests[0]])
    late = engine.prepare([9, 9], options)
    engine.add(late)
    run_to_end(engine, answers)
    assert len(answers.tokens[late, 0]) == 8
    engine.close()


def test_micro_batches_need_stages() -> None:
    with pytest.raises(ConfigError, match=r"micro_batches=2.*without stages"):
        EngineConfig(micro_batches=2)
