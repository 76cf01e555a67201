"""Drives a backend step by step, as the engine would, and gathers the logits of every token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Backend
from headrace.backends.registry import create_backend
from headrace.runtime.config import EngineConfig
from headrace.runtime.core import Row, StepPlan
from headrace.runtime.machine.hardware import probe_hardware
from headrace.runtime.manifest import read_manifest

Float = NDArray[np.float32]
# For each step its rows: (sequence, past_len, stop) sends tokens [past_len, stop).
Schedule = Sequence[Sequence[tuple[int, int, int]]]


def run_schedule(
    package: Path,
    sequences: Sequence[Sequence[int]],
    schedule: Schedule,
    *,
    form: str | None = None,
    context_tokens: int | None = None,
    stages: int = 1,
) -> tuple[list[Float], list[Float]]:
    """Load a package, run the steps on one thread; logits [T, V] and entropy [T] a sequence.

    Sequence i has slot i. A position that is sent again keeps its last answer; one that is never
    sent has NaN.
    """
    config = EngineConfig(
        max_sequences=len(sequences),
        num_threads=1,
        form=form,
        context_tokens=context_tokens,
        stages=stages,
    )
    backend = create_backend("cpu", package, read_manifest(package), config, probe_hardware())
    return drive(backend, sequences, schedule)


def drive(
    backend: Backend, sequences: Sequence[Sequence[int]], schedule: Schedule
) -> tuple[list[Float], list[Float]]:
    """As `run_schedule`, of a backend that is not loaded yet; closes it."""
    vocab_size = backend.load().vocab_size
    logits = [np.full((len(s), vocab_size), np.nan, np.float32) for s in sequences]
    entropy = [np.full(len(s), np.nan, np.float32) for s in sequences]
    try:
        for step_id, parts in enumerate(schedule):
            rows = tuple(
                Row(i, i, past, tuple(sequences[i][past:stop]), num_logits=stop - past)
                for i, past, stop in sorted(parts)
            )
            output = backend.collect(backend.submit(StepPlan(step_id, rows)))
            first = 0
            for row in rows:
                span = slice(row.past_len, row.past_len + row.num_logits)
                last = first + row.num_logits
                logits[row.seq_id][span] = output.logits[first:last]
                entropy[row.seq_id][span] = output.entropy_nats[first:last]
                first = last
    finally:
        backend.close()
    return logits, entropy


def ragged_schedule(lengths: Sequence[int], rng: np.random.Generator) -> Schedule:
    """Random steps until all tokens were sent: chunks of 1 to 8 of some of the sequences.

    Some sequences idle in a step, and some go back by up to three tokens, as after rejected
    drafts.
    """
    sent = [0] * len(lengths)
    schedule = []
    while any(n < length for n, length in zip(sent, lengths, strict=True)):
        rows = []
        for i, length in enumerate(lengths):
            if sent[i] == length or rng.random() < 0.3:
                continue
            past = max(0, sent[i] - int(rng.integers(4))) if rng.random() < 0.5 else sent[i]
            sent[i] = min(length, past + int(rng.integers(1, 9)))
            rows.append((i, past, sent[i]))
        if rows:
            schedule.append(rows)
    return schedule


def relative_error(actual: Float, expected: NDArray[np.floating]) -> float:
    """Largest difference as a share of the largest expected value; NaN where one is missing."""
    return float(np.abs(actual - expected).max() / np.abs(expected).max())
