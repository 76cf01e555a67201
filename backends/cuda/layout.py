"""Inputs of a graph of the form "paged" from rows of a StepPlan; names as in runtime.manifest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backends.cuda.blocks import BlockPool
from headrace.runtime import manifest as io
from headrace.runtime.core import Row

Feeds = dict[str, NDArray[Any]]


def step_feeds(rows: Sequence[Row], pool: BlockPool) -> Feeds:
    """Everything but the cache, for rows whose positions the pool lets them write to.

    A step without logits computes one anyway: operators are not asked to work on nothing.
    """
    counts = np.array([len(row.tokens) for row in rows])
    past = np.array([row.past_len for row in rows])
    ends = np.cumsum(counts)
    owners = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(ends[-1]) - np.repeat(ends - counts - past, counts)
    tables = [pool.table(row.slot) for row in rows]
    block_table = np.full((len(rows), max(map(len, tables))), -1, np.int32)
    for line, table in zip(block_table, tables, strict=True):
        line[: len(table)] = table
    blocks = block_table[owners, positions // pool.block_tokens]
    logits = [np.arange(end - row.num_logits, end) for row, end in zip(rows, ends, strict=True)]
    wanted = np.concatenate(logits).astype(np.int64)
    return {
        io.INPUT_IDS: np.array([token for row in rows for token in row.tokens], np.int64),
        io.CUMULATIVE_SEQLENS: np.concatenate([[0], ends]).astype(np.int32),
        io.CACHED_SEQLENS: past.astype(np.int32),
        io.BLOCK_TABLE: block_table,
        io.SLOT_MAPPING: (
            blocks * pool.block_tokens + (positions % pool.block_tokens).astype(np.int32)
        ),
        io.ATTENTION_METADATA: np.array([counts.max(), (past + counts).max()], np.int32),
        io.LOGITS_INDEX: wanted if len(wanted) else np.zeros(1, np.int64),
        io.POSITIONS: positions.astype(np.int64),
    }
