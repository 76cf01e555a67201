"""All ranks of a split target in one process, one piece after the other, sums taken by numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backends.ort_session import cpu_session
from headrace.backends.tensor_parallel import heads
from headrace.runtime import manifest as io
from headrace.runtime.manifest import read_manifest

Float = NDArray[np.float32]
CAPACITY = 64  # tokens
_TYPES: dict[str, Any] = {"float32": np.float32, "int8": np.int8, "float16": np.float16}


@dataclass
class Said:
    """float32 [T, vocab], [T] twice; the likeliest tokens, where the graphs say."""

    logits: Float
    entropy: Float
    log_sum_exp: Float
    likeliest: NDArray[np.int64] | None


class Ranks:
    """One sequence.

    Args:
        load: makes something with `run(output names or None, feeds)` of a graph file.
    """

    def __init__(self, package: Path, target: str, load: Callable[[Path], Any] | None = None):
        manifest = read_manifest(package)
        self._target = next(t for t in manifest.targets if t.name == target)
        load = load or (lambda path: cpu_session(path, 1, {"session.x64quantprecision": "1"}))
        self._pieces = [
            [load(package / file) for file in rank.graphs[0].files] for rank in self._target.ranks
        ]
        model, dtype = manifest.model, _TYPES[self._target.kv_cache.dtype]
        self._paged = self._target.kv_cache.block_tokens is not None
        self._caches: list[dict[str, NDArray[Any]]] = []
        for rank in self._target.ranks:
            shape = (1, rank.num_kv_heads, CAPACITY, model.head_dim)
            if self._paged:  # one block
                shape = (1, CAPACITY, rank.num_kv_heads, model.head_dim)
            names = (io.PAST_KEY, io.PAST_VALUE)
            layers = range(model.num_layers)
            self._caches.append(
                {n.format(i): np.zeros(shape, dtype) for i in layers for n in names}
            )
        self._past = 0

    def run(self, ids: list[int]) -> Said:
        """Append tokens."""
        feeds = self._paged_feeds(ids) if self._paged else self._feeds(ids)
        self._past += len(ids)
        carried: list[dict[str, NDArray[Any]]] = [{} for _ in self._pieces]
        for number in range(len(self._pieces[0])):
            given = []
            for rank, pieces in enumerate(self._pieces):
                piece = pieces[number]
                known = feeds | self._caches[rank] | carried[rank]
                wanted = {i.name: known[i.name] for i in piece.get_inputs()}
                names = [o.name for o in piece.get_outputs()]
                given.append(dict(zip(names, piece.run(names, wanted), strict=True)))
                for name in [n for n in names if n.startswith("present_")]:
                    self._caches[rank][name.replace("present_", "past_", 1)] = given[-1].pop(name)
            if io.PARTIAL in given[0]:
                total = np.sum([g[io.PARTIAL] for g in given], axis=0, dtype=np.float32)
                total = total.astype(given[0][io.PARTIAL].dtype)
                carried = [{io.SUMMED: total, io.CARRIED: g.get(io.RESIDUAL, total)} for g in given]
        sums = np.stack([g[io.HEAD_SUMS] for g in given])
        likeliest = None
        if io.ARGMAX in given[0]:
            likeliest = likeliest_of(sums, np.stack([g[io.ARGMAX] for g in given]))
        logits = np.concatenate([g[io.LOGITS] for g in given], axis=1)
        return Said(logits, heads.entropy_nats(sums), log_sum_exp(sums), likeliest)

    def _feeds(self, ids: list[int]) -> dict[str, NDArray[Any]]:
        n, span = len(ids), np.arange(len(ids))
        return {
            io.INPUT_IDS: np.array(ids, np.int64),
            io.GATHER_INDEX: span[None],
            io.SCATTER_INDEX: span,
            io.SEQLENS_K: np.array([self._past + n - 1], np.int32),
            io.TOTAL_TOKENS: np.array(CAPACITY, np.int32),
            io.QUERY_SEQLENS: np.array([n], np.int32),
            io.LOGITS_INDEX: span,
        }

    def _paged_feeds(self, ids: list[int]) -> dict[str, NDArray[Any]]:
        n, span = len(ids), np.arange(len(ids))
        return {
            io.INPUT_IDS: np.array(ids, np.int64),
            io.CUMULATIVE_SEQLENS: np.array([0, n], np.int32),
            io.CACHED_SEQLENS: np.array([self._past], np.int32),
            io.BLOCK_TABLE: np.zeros((1, 1), np.int32),
            io.SLOT_MAPPING: (self._past + span).astype(np.int32),
            io.ATTENTION_METADATA: np.array([n, self._past + n], np.int32),
            io.LOGITS_INDEX: span,
            io.POSITIONS: self._past + span,
        }


def log_sum_exp(head_sums: Float) -> Float:
    """Of all ranks' logits, float32 [R]; `head_sums` as of `heads.entropy_nats`."""
    top, powers = head_sums[:, :, 0].astype(np.float64), head_sums[:, :, 1]
    highest = top.max(axis=0)
    total = (np.exp(top - highest) * powers).sum(axis=0)
    return np.asarray(highest + np.log(total), np.float32)


def likeliest_of(head_sums: Float, argmax: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [R]: the token with the largest logit, the first of equals.

    Args:
        argmax: int64 [ranks, R], each rank's own.
    """
    best = head_sums[:, :, 0].argmax(axis=0)
    return np.asarray(argmax[best, np.arange(len(best))], np.int64)
