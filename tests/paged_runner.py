"""Runs a graph of the form "paged" through the reference evaluator, as plainly as can be: every
sequence has all the blocks that it may need from the start, scattered over the pool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from contrib_ops import evaluator
from numpy.typing import NDArray

from headrace.runtime import manifest as io
from headrace.runtime.manifest import Manifest

Float = NDArray[np.float32]
# For each step its rows: (sequence, past_len, stop) sends tokens [past_len, stop).
Schedule = Sequence[Sequence[tuple[int, int, int]]]


def run_paged(
    package: Path,
    manifest: Manifest,
    sequences: Sequence[Sequence[int]],
    schedule: Schedule,
    *,
    target: str,
    block_tokens: int = 4,
) -> tuple[list[Float], list[Float]]:
    """Logits [T, V] and entropy [T] a sequence; the argmax is checked on the way.

    A position that is sent again keeps its last answer; one that is never sent has NaN.
    """
    model = manifest.model
    (graph,) = next(t for t in manifest.targets if t.name == target).graphs
    run = evaluator(package / graph.file)
    most = -(-max(map(len, sequences)) // block_tokens)
    shuffled = np.random.default_rng(3).permutation(len(sequences) * most + 2)
    tables = shuffled[: len(sequences) * most].reshape(-1, most).astype(np.int32)
    shape = (len(shuffled), block_tokens, model.num_kv_heads, model.head_dim)
    caches: dict[str, NDArray[Any]] = {
        name.format(layer): np.full(shape, 60000, np.float16)  # nobody may read what nobody wrote
        for layer in range(model.num_layers)
        for name in (io.PAST_KEY, io.PAST_VALUE)
    }
    logits = [np.full((len(s), model.vocab_size), np.nan, np.float32) for s in sequences]
    entropy = [np.full(len(s), np.nan, np.float32) for s in sequences]
    for rows in schedule:
        spans = [(i, past, stop) for i, past, stop in sorted(rows)]
        counts = [stop - past for _, past, stop in spans]
        positions = np.concatenate([np.arange(past, stop) for _, past, stop in spans])
        owners = np.repeat([i for i, _, _ in spans], counts)
        ids = np.array([t for i, past, stop in spans for t in sequences[i][past:stop]], np.int64)
        blocks = tables[owners, positions // block_tokens]
        feeds: dict[str, NDArray[Any]] = {
            io.INPUT_IDS: ids,
            io.CUMULATIVE_SEQLENS: np.cumsum([0, *counts], dtype=np.int32),
            io.CACHED_SEQLENS: np.array([past for _, past, _ in spans], np.int32),
            io.BLOCK_TABLE: tables[[i for i, _, _ in spans]],
            io.SLOT_MAPPING: (blocks * block_tokens + positions % block_tokens).astype(np.int32),
            io.ATTENTION_METADATA: np.array([max(counts), positions.max() + 1], np.int32),
            io.LOGITS_INDEX: np.arange(len(ids)),
            io.POSITIONS: positions,
        }
        named = {name: feeds[name] for name in graph.inputs}
        outputs = [io.LOGITS, io.ENTROPY, io.ARGMAX]
        given, nats, likeliest = run.run(outputs, {**named, **caches})
        np.testing.assert_array_equal(likeliest, given.argmax(axis=1))
        first = 0
        for i, past, stop in spans:
            logits[i][past:stop] = given[first : first + stop - past]
            entropy[i][past:stop] = nats[first : first + stop - past]
            first += stop - past
    return logits, entropy
