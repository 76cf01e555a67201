"""Ranks in processes of their own against one process; what happens when one dies or hangs."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from backend_driver import drive, ragged_schedule, run_schedule
from smollm2 import require_checkpoint

from headrace.backends.tensor_parallel import watch
from headrace.backends.tensor_parallel.backend import TensorParallelBackend
from headrace.exporters.package import export_package
from headrace.runtime import EngineConfig, Runtime, cli
from headrace.runtime.core import KvCopy, KvOp, KvRead, KvRelease, KvWrite, Row, StepPlan
from headrace.runtime.errors import BackendUnavailableError, EngineProcessError
from headrace.runtime.machine.hardware import probe_hardware
from headrace.runtime.manifest import read_manifest

posix = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
TOLERANCE = 1e-4
WAIT_S = 60.0
LENGTHS = (1, 30, 22, 9)
RNG = np.random.default_rng(1)
SEQUENCES = [RNG.integers(3, 250, length).tolist() for length in LENGTHS]
SCHEDULE = ragged_schedule(LENGTHS, np.random.default_rng(2))
PROMPTS = ["Once upon a time", "There was a", "the and her", "In"]
ANSWERS = {"max_new_tokens": 60, "ignore_eos": True}
PARENT = """
import sys, time
from headrace.runtime import Runtime
runtime = Runtime.load(sys.argv[1], "cpu")
print("loaded", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def packages(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> Callable[[int], Path]:
    """A tiny llama with biases for so many ranks; 1 is one process."""
    folder = tmp_path_factory.mktemp("ranks")

    def make(count: int) -> Path:
        package = folder / str(count)
        if not package.exists():
            ranks = None if count == 1 else count
            source = tiny_checkpoint(bias=True)
            export_package(
                source, package, precision="fp32", forms=("ragged",), tensor_parallel=ranks
            )
        return package

    return make


def make_backend(package: Path, *, gloo: bool = False, **options: Any) -> TensorParallelBackend:
    config = EngineConfig(num_threads=1, **options)
    manifest = read_manifest(package)
    return TensorParallelBackend(package, manifest, config, probe_hardware(), gloo=gloo)


def children() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if "--headrace-child" in child.cmdline() and child.cmdline()[-1] == "rank"
    ]


@pytest.fixture(autouse=True)
def no_rank_stays() -> Iterator[None]:
    assert not children()
    yield
    assert not children()


@pytest.mark.parametrize("gloo", [False, pytest.param(True, marks=pytest.mark.torch)])
@pytest.mark.parametrize("count", [2, 4])
def test_logits(packages: Callable[[int], Path], count: int, gloo: bool) -> None:
    if gloo and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    expected, nats = run_schedule(packages(1), SEQUENCES, SCHEDULE)
    backend = make_backend(packages(count), gloo=gloo, max_sequences=4)
    logits, entropy = drive(backend, SEQUENCES, SCHEDULE)
    for i in range(len(SEQUENCES)):
        assert np.abs(logits[i] - expected[i]).max() < TOLERANCE
        assert np.abs(entropy[i] - nats[i]).max() < TOLERANCE


def test_kv_operations(packages: Callable[[int], Path]) -> None:
    """A copied, a restored and a computed prefix go on alike; bytes of a slot are of all ranks."""
    backend, text = make_backend(packages(2), max_sequences=3), SEQUENCES[1]
    caps = backend.load()

    def step(rows: list[Row], *ops: KvOp) -> Any:
        return backend.collect(backend.submit(StepPlan(0, tuple(rows), ops)))

    def row(slot: int, past: int) -> Row:
        return Row(slot, slot, past, tuple(text[past:]), 1)

    whole = np.array(step([row(2, 0)]).logits)
    step([Row(0, 0, 0, tuple(text[:18]), 0)], KvRelease(2))
    (data,) = step([], KvCopy(0, 1, 14), KvRead(0, 14)).kv_reads
    assert len(data) == 14 * caps.kv_bytes_per_token
    out = step([row(1, 14), row(2, 14)], KvWrite(2, 14, data))
    np.testing.assert_array_equal(out.logits[0], out.logits[1])
    assert np.abs(out.logits - whole).max() < TOLERANCE
    backend.close()
    backend.close()


def greedy(package: Path, **options: Any) -> list[tuple[int, ...]]:
    with Runtime.load(package, "cpu", **options) as runtime:
        return [done.token_ids for done in runtime.generate(PROMPTS, **ANSWERS)]


def test_a_runtime_decodes_the_same(packages: Callable[[int], Path]) -> None:
    """With drafts, kept prefixes and all; the package says that it is split."""
    expected = greedy(packages(1))
    assert greedy(packages(2)) == expected
    assert greedy(packages(2), max_draft_tokens=4) == expected


@posix
def test_a_killed_rank(packages: Callable[[int], Path]) -> None:
    """Answers under way go on with the same text, whichever dies, busy or idle."""
    expected = greedy(packages(1))
    with Runtime.load(packages(2), "cpu") as runtime:
        handles = [runtime.submit(prompt, **ANSWERS) for prompt in PROMPTS]
        next(iter(handles[0]))
        victims = children()
        assert len(victims) == 2
        victims[1].kill()
        assert [h.result(WAIT_S).token_ids for h in handles] == expected
        assert len(children()) == 2 and not set(victims) & set(children())
        children()[0].kill()  # nobody decodes
        again = [done.token_ids for done in runtime.generate(PROMPTS, **ANSWERS)]
        assert again == expected


@posix
def test_a_rank_that_hangs(
    packages: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "TICK_S", 0.1)
    backend = make_backend(packages(2), max_sequences=1)
    backend.load()
    plan = StepPlan(0, (Row(0, 0, 0, (5, 6, 7), 1),))
    before = np.array(backend.collect(backend.submit(plan)).logits)
    children()[1].send_signal(signal.SIGSTOP)
    monkeypatch.setattr(watch, "MAX_STILL_TICKS", 5)
    with pytest.raises(EngineProcessError, match="SIGKILL"):
        backend.collect(backend.submit(plan))
    monkeypatch.undo()
    np.testing.assert_array_equal(backend.collect(backend.submit(plan)).logits, before)
    backend.close()


@posix
def test_ranks_end_with_their_parent(packages: Callable[[int], Path]) -> None:
    command = [sys.executable, "-c", PARENT, str(packages(2))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"loaded\n"
        ranks = psutil.Process(parent.pid).children()
        assert len(ranks) == 2
        parent.kill()
    deadline = time.monotonic() + WAIT_S
    while any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks):
        assert time.monotonic() < deadline, "a rank has outlived its parent"
        time.sleep(0.01)


def test_inspecting(packages: Callable[[int], Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(packages(2))]) == 0
    assert "rank 1   2 heads (1 KV), 128 tokens" in capsys.readouterr().out


def test_ranks_that_cannot_be_run(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    export_package(tiny_checkpoint(), tmp_path / "p", targets=("cuda_fp16",), tensor_parallel=2)
    with pytest.raises(BackendUnavailableError, match="split between processes"):
        Runtime.load(tmp_path / "p")


@pytest.mark.model
@pytest.mark.slow
def test_smollm2(smollm2_package: Callable[[str, str], Path], tmp_path: Path) -> None:
    """9 heads in groups of 3 on two ranks: 6 and 3."""
    one, two = smollm2_package("fp32", "fp32"), tmp_path / "two"
    options = {"precision": "fp32", "calibrate": False, "forms": ("ragged",)}
    export_package(require_checkpoint(), two, tensor_parallel=2, **options)
    (target,) = read_manifest(two).targets
    assert [rank.num_heads for rank in target.ranks] == [6, 3]
    text = [[int(i) for i in RNG.integers(300, 40000, 24)]]
    schedule = [[(0, 0, 20)], *([(0, t, t + 1)] for t in range(20, 24))]
    expected, _ = run_schedule(one, text, schedule)
    logits, _ = drive(make_backend(two, max_sequences=1), text, schedule)
    assert np.abs(logits[0] - expected[0]).max() < TOLERANCE
    answers = []
    for package in (one, two):
        with Runtime.load(package, "cpu", max_sequences=4) as runtime:
            done = runtime.generate("The capital of France is", max_new_tokens=24)
            answers.append((done.token_ids, done.text))
    assert answers[0] == answers[1]
