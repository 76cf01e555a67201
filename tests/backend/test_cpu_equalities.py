"""Batch = single, chunked = whole, packed = padded: the same bits, on the CPU backend.

All on an INT8 cache, where ONNX Runtime's attention gives the same bits for one query and for many.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from headrace.backends.base import Probabilities
from headrace.backends.cpu_avx512.backend import CpuBackend
from headrace.exporters.validate import GraphRunner
from headrace.runtime.config import EngineConfig
from headrace.runtime.core import KvCopy, KvOp, KvRead, KvRelease, KvWrite, Row, StepPlan
from headrace.runtime.machine.hardware import probe_hardware
from headrace.runtime.manifest import PROBABILITY_BLOCK, read_manifest

SLOTS = 6
PRECISIONS = ["w8a8_row", "w7a8_row", "w8a8_block", "w4a8_block"]


@pytest.fixture(scope="module", params=[*PRECISIONS, "w8a8_row-uniform"])
def backend(
    request: pytest.FixtureRequest, tiny_package: Callable[..., Path]
) -> Iterator[CpuBackend]:
    precision, _, form = request.param.partition("-")
    folder = tiny_package(precision, "int8")
    config = EngineConfig(max_sequences=SLOTS, form=form or None)
    made = CpuBackend(folder, read_manifest(folder), config, probe_hardware())
    exact = made.load().exact_rows
    if not exact:
        made.close()
        assert precision == "w4a8_block"
        pytest.skip("this processor's kernels for 4 bits are not exact, and the backend says so")
    yield made
    made.close()


class Driver:
    """Runs plans and keeps each sequence's logits."""

    def __init__(self, backend: CpuBackend) -> None:
        self.backend, self.step = backend, 0

    def run(self, rows: Sequence[Row], *ops: KvOp) -> list[np.ndarray]:
        self.step += 1
        out = self.backend.collect(self.backend.submit(StepPlan(self.step, tuple(rows), ops)))
        split = np.cumsum([row.num_logits for row in rows])[:-1]
        return [part.copy() for part in np.split(out.logits, split)]

    def alone(self, tokens: Sequence[int], slot: int = 0) -> np.ndarray:
        """Logits of every position, the whole sequence in one row."""
        self.run([], KvRelease(slot))
        return self.run([Row(0, slot, 0, tuple(tokens), len(tokens))])[0]


def sequences(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 256) for _ in range(rng.randrange(4, 60))] for _ in range(count)]


def test_chunks_give_the_bits_of_the_whole(backend: CpuBackend) -> None:
    driver = Driver(backend)
    (tokens,) = sequences(1, seed=5)
    whole = driver.alone(tokens)
    rng = random.Random(6)
    for _ in range(5):
        past, parts = 0, []
        while past < len(tokens):
            size = min(rng.choice([1, 2, 3, 7, 16]), len(tokens) - past)
            row = Row(0, 2, past, tuple(tokens[past : past + size]), size)
            parts += driver.run([row])
            past += size
        np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_company_does_not_change_a_sequence(backend: CpuBackend) -> None:
    """Random arrivals, chunk sizes and pauses; slots between busy ones are idle."""
    driver = Driver(backend)
    rng = random.Random(7)
    texts = sequences(SLOTS, seed=8)
    expected = [driver.alone(tokens) for tokens in texts]
    past, seen = [0] * SLOTS, [[] for _ in range(SLOTS)]  # type: ignore[var-annotated]
    while any(past[i] < len(texts[i]) for i in range(SLOTS)):
        rows = []
        for i, tokens in enumerate(texts):
            if past[i] < len(tokens) and rng.random() < 0.6:
                size = min(rng.choice([1, 1, 1, 5, 12, 20]), len(tokens) - past[i])
                rows.append(Row(i, i, past[i], tuple(tokens[past[i] : past[i] + size]), size))
                past[i] += size
        if rows:
            for row, logits in zip(rows, driver.run(rows), strict=True):
                seen[row.seq_id].append(logits)
    for i in range(SLOTS):
        np.testing.assert_array_equal(np.concatenate(seen[i]), expected[i])


def test_rejected_tokens_leave_no_trace(backend: CpuBackend) -> None:
    driver = Driver(backend)
    (tokens,) = sequences(1, seed=9)
    expected = driver.alone(tokens)
    parts = []
    for past, token in enumerate(tokens):
        wrong = [(token + k) % 256 for k in (1, 2, 3)]
        logits = driver.run([Row(0, 1, past, (token, *wrong), 4)])[0]
        parts.append(logits[:1])
    np.testing.assert_array_equal(np.concatenate(parts), expected)


def test_a_copied_prefix_is_the_prefix(backend: CpuBackend) -> None:
    driver = Driver(backend)
    first, second = sequences(2, seed=10)
    shared = first[: len(first) // 2]
    expected = driver.alone(shared + second)
    driver.alone(first, slot=3)
    logits = driver.run(
        [Row(0, 5, len(shared), tuple(second), len(second))],
        KvRelease(5),
        KvCopy(3, 5, len(shared)),
    )[0]
    np.testing.assert_array_equal(logits, expected[len(shared) :])


def test_what_was_read_from_a_slot_can_be_written_to_another(backend: CpuBackend) -> None:
    driver = Driver(backend)
    (tokens,) = sequences(1, seed=6)
    expected = driver.alone(tokens)
    half = len(tokens) // 2
    plan = StepPlan(0, (), (KvRead(0, half), KvRelease(0)))
    (data,) = backend.collect(backend.submit(plan)).kv_reads
    assert data
    (rest,) = driver.run(
        [Row(0, 2, half, tuple(tokens[half:]), len(tokens) - half)], KvWrite(2, half, data)
    )
    np.testing.assert_array_equal(rest, expected[half:])


def test_packed_is_padded(backend: CpuBackend, tiny_package: Callable[..., Path]) -> None:
    """The packed step against the plain runner, one sequence at a time with no packing."""
    folder = backend._folder
    target = read_manifest(folder).targets[0]
    file = folder / next(g.file for g in target.graphs if g.form == "uniform")
    texts = sequences(3, seed=11)
    driver = Driver(backend)
    rows = [Row(i, i, 0, tuple(tokens), len(tokens)) for i, tokens in enumerate(texts)]
    for tokens, logits in zip(texts, driver.run(rows), strict=True):
        runner = GraphRunner(file, capacity_tokens=64)
        np.testing.assert_array_equal(runner.run(tokens), logits)


def test_no_logits_where_none_are_asked_for(backend: CpuBackend) -> None:
    driver = Driver(backend)
    (tokens,) = sequences(1, seed=12)
    middle, end = tokens[:3], tokens[3:]
    assert driver.run([Row(0, 0, 0, tuple(middle), 0)])[0].shape == (0, 256)
    logits = driver.run([Row(0, 0, 3, tuple(end), 1)])[0]
    np.testing.assert_array_equal(logits[0], driver.alone(tokens)[-1])


def test_entropy_belongs_to_its_row(backend: CpuBackend) -> None:
    texts = sequences(4, seed=13)
    rows = tuple(Row(i, i, 0, tuple(tokens), 1) for i, tokens in enumerate(texts))
    out = backend.collect(backend.submit(StepPlan(1, rows)))
    logits = out.logits.astype(np.float64)
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(out.entropy_nats, -(p * np.log(p)).sum(axis=1), atol=1e-4)


def test_probabilities_are_of_the_scaled_logits(backend: CpuBackend) -> None:
    """Each row at its own temperature, the same bits alone; none where no row wants any."""
    texts = sequences(4, seed=14)
    inverse = [0.0, 1.0, 1.25, 2.0]
    rows = [Row(i, i, 0, tuple(tokens), 1, inverse[i]) for i, tokens in enumerate(texts)]
    out = backend.collect(backend.submit(StepPlan(1, tuple(rows))))
    assert out.probabilities is not None
    logits, given = out.logits.copy(), Probabilities.empty(4, out.logits.shape[1])
    given.assign(slice(4), out.probabilities)
    for i, row in enumerate(rows):
        alone = backend.collect(backend.submit(StepPlan(2, (row,))))
        if not inverse[i]:
            assert alone.probabilities is None
            continue
        assert alone.probabilities is not None
        for one, many in zip(
            fields(alone.probabilities.rows(0)), fields(given.rows(i)), strict=True
        ):
            np.testing.assert_array_equal(one, many)
        scaled = (logits[i] - logits[i].max()).astype(np.float64) * inverse[i]
        expected = np.exp(scaled) / np.exp(scaled).sum()
        values = given.values[i, : len(expected)]
        np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-7)
        blocks = np.zeros_like(given.values[i]).reshape(-1, PROBABILITY_BLOCK)
        blocks.flat[: len(values)] = values
        np.testing.assert_array_equal(given.values[i], blocks.ravel())
        np.testing.assert_array_equal(given.block_maxima[i], blocks.max(axis=1))
        np.testing.assert_allclose(given.block_sums[i], blocks.sum(axis=1), rtol=1e-5)


def fields(given: Probabilities) -> list[np.ndarray]:
    return [given.values, given.block_maxima, given.block_sums]


def test_a_graph_without_probabilities_gives_none(
    backend: CpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one call and in several: never memory that nobody wrote."""
    monkeypatch.setattr(backend, "_gives_probabilities", False)
    prompt = tuple(sequences(1, seed=15)[0] * 20)
    decode, chunk = Row(0, 0, 0, (5,), 1, 1.25), Row(1, 1, 0, prompt, 1, 1.25)
    for rows in [(decode,), (decode, chunk)]:
        assert backend.collect(backend.submit(StepPlan(1, rows))).probabilities is None
