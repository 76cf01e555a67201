"""The CUDA backend on a device that is not one (`fake_cuda`): blocks, binding and KV operations.

The numbers come from the reference evaluator, which treats every row alike, so what is equal by
design is equal here to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from backend_driver import Schedule, drive, ragged_schedule
from fake_cuda import make_backend
from paged_runner import run_paged

from headrace.backends.cuda import provider
from headrace.exporters.package import export_package
from headrace.runtime import Runtime, factory
from headrace.runtime.core import KvCopy, KvOp, KvRead, KvRelease, KvWrite, Row, StepPlan
from headrace.runtime.errors import (
    BackendError,
    ConfigError,
    InsufficientMemoryError,
    PackageError,
)
from headrace.runtime.manifest import read_manifest

LENGTHS = (1, 30, 22, 9)
RNG = np.random.default_rng(1)
SEQUENCES = [RNG.integers(3, 250, length).tolist() for length in LENGTHS]
SCHEDULES: dict[str, Schedule] = {
    "prefill": [[(i, 0, n) for i, n in enumerate(LENGTHS)]],
    "decode": [
        [(i, t, t + 1) for i, n in enumerate(LENGTHS) if t < n] for t in range(max(LENGTHS))
    ],
    "ragged": ragged_schedule(LENGTHS, np.random.default_rng(2)),
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]) -> Path:
    folder = tmp_path_factory.mktemp("cuda") / "package"
    export_package(tiny_checkpoint(), folder, targets=("cuda_fp16", "cuda_w4"))
    return folder


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("target", ["cuda_fp16", "cuda_w4"])
def test_logits(package: Path, kind: str, target: str) -> None:
    made = make_backend(package, max_sequences=4, target=target)
    logits, entropy = drive(made.backend, SEQUENCES, SCHEDULES[kind])
    manifest = read_manifest(package)
    expected, nats = run_paged(package, manifest, SEQUENCES, SCHEDULES[kind], target=target)
    for i in range(len(SEQUENCES)):
        np.testing.assert_array_equal(logits[i], expected[i])
        np.testing.assert_array_equal(entropy[i], nats[i])
    assert not made.device.allocated  # closed


def step(backend: object, rows: list[Row], *ops: KvOp) -> np.ndarray:
    output = backend.collect(backend.submit(StepPlan(0, tuple(rows), ops)))
    return np.array(output.logits)


def row(slot: int, text: list[int], past: int) -> Row:
    return Row(slot, slot, past, tuple(text[past:]), 1)


def test_kv_operations_in_one_text(package: Path) -> None:
    """A copied, a restored and a computed prefix go on alike, whatever the original does then."""
    made = make_backend(package, max_sequences=4)
    backend, text = made.backend, SEQUENCES[1]
    backend.load()
    alone = step(backend, [row(3, text, 0)], KvRelease(3))
    step(backend, [row(0, text[:18], 0)])
    before = made.device.num_copies
    ticket = backend.submit(StepPlan(1, (), (KvCopy(0, 1, 14), KvRead(0, 14))))
    (data,) = backend.collect(ticket).kv_reads
    assert len(data) == 14 * read_manifest(package).targets[0].kv_cache.bytes_per_token
    assert made.device.num_copies == before
    # The original goes back and takes another way; the copy and what was read are not touched.
    other = [*text[:13], 7, 7, 7, 7]
    step(backend, [row(0, other, 13)])
    rows = [row(1, text, 14), row(2, text, 14)]
    copied, restored = step(backend, rows, KvWrite(2, 14, data))
    assert made.device.num_copies > before
    np.testing.assert_array_equal(copied, alone[0])
    np.testing.assert_array_equal(restored, alone[0])
    again = backend.collect(backend.submit(StepPlan(2, (), (KvRead(1, 14), KvRead(2, 14)))))
    assert again.kv_reads == (data, data)
    backend.close()


def test_a_step_without_logits_and_one_without_rows(package: Path) -> None:
    backend = make_backend(package, max_sequences=2).backend
    vocab = backend.load().vocab_size
    rows = (Row(0, 0, 0, (5, 6, 7), 0),)
    output = backend.collect(backend.submit(StepPlan(0, rows)))
    assert output.logits.shape == (0, vocab) and output.entropy_nats.shape == (0,)
    output = backend.collect(backend.submit(StepPlan(1, ())))
    assert output.logits.shape == (0, vocab) and output.probabilities is None
    backend.close()
    backend.close()
    with pytest.raises(BackendError, match="closed"):
        backend.submit(StepPlan(2, ()))


def test_capabilities(package: Path) -> None:
    target = read_manifest(package).targets[0]
    block_bytes = 4 * target.kv_cache.bytes_per_token
    # 80% of the memory is 20 blocks, two of each slot may be partly empty.
    made = make_backend(package, max_sequences=3, free_bytes=25 * block_bytes, context_tokens=40)
    caps = made.backend.load()
    assert (caps.name, caps.max_slots, caps.context_tokens) == ("cuda (cuda_fp16)", 3, 40)
    assert caps.kv_budget_tokens == (20 - 6) * 4
    assert caps.max_row_tokens == 40 and not caps.exact_rows
    made.backend.close()
    # More than full slots can use is not taken.
    caps = make_backend(package, max_sequences=3, context_tokens=40).backend.load()
    assert caps.kv_budget_tokens == 3 * 40


def test_too_little_memory(package: Path) -> None:
    made = make_backend(package, max_sequences=3, free_bytes=5000)
    with pytest.raises(InsufficientMemoryError, match="max_sequences"):
        made.backend.load()
    made = make_backend(package, max_sequences=3, kv_budget_bytes=1 << 30)
    with pytest.raises(InsufficientMemoryError, match="kv_budget_bytes"):
        made.backend.load()


def test_targets_and_forms_by_name(package: Path, tiny_package: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="cuda_fp16, cuda_w4"):
        make_backend(package, target="cpu_int8").backend.load()
    with pytest.raises(ConfigError, match="paged"):
        make_backend(package, form="uniform").backend.load()
    with pytest.raises(PackageError, match="no CUDA target"):
        make_backend(tiny_package("fp32")).backend.load()


def test_a_pool_that_runs_out_fails_the_step_and_goes_on(package: Path) -> None:
    """The scheduler keeps to the budget; a plan that does not is refused without harm."""
    target = read_manifest(package).targets[0]
    free = 10 * 4 * target.kv_cache.bytes_per_token  # 8 blocks
    backend = make_backend(package, max_sequences=2, free_bytes=free).backend
    backend.load()
    text = SEQUENCES[1]
    expected = step(backend, [row(0, text[:20], 0)])
    with pytest.raises(BackendError, match="KV pool"):
        backend.submit(StepPlan(1, (row(0, text[:20], 19), row(1, text[:20], 0))))
    np.testing.assert_array_equal(step(backend, [row(0, text[:20], 0)]), expected)


def test_a_runtime_decodes_many_as_each_alone(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scheduler, kept prefixes, copies and blocks together, greedily."""

    def answers(prompts: list[list[int]], max_sequences: int) -> list[tuple[int, ...]]:
        options = {"max_sequences": max_sequences, "context_tokens": 64, "max_chunk_tokens": 7}
        made = make_backend(package, **options)
        monkeypatch.setattr(provider, "obstacle", lambda: None)
        monkeypatch.setattr(factory, "create_backend", lambda *_: made.backend)
        with Runtime.load(package, "cuda", **options) as runtime:
            done = runtime.generate(prompts, max_new_tokens=12, ignore_eos=True)
        assert not made.device.allocated
        return [result.token_ids for result in done]

    common = SEQUENCES[2]
    prompts = [[*common[:17], i] for i in range(3, 7)] + [s[:9] for s in SEQUENCES[1:]]
    together = answers(prompts, 3)
    assert together == answers(prompts, 1)
    assert all(len(answer) == 12 for answer in together)
