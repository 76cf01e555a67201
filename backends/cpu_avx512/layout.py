"""From a StepPlan to graph inputs.

What a step binds depends only on its shape: which slots, how many tokens and how many logits each.
Decode steps repeat their shape, so what follows from it is made once and kept: index arrays and
output buffers. Per step only token ids and lengths are written, in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Probabilities, StepOutput
from headrace.backends.cpu_avx512.kv_storage import KvStorage
from headrace.backends.cpu_avx512.stage import Stage
from headrace.backends.ort_import import load_onnxruntime
from headrace.runtime import manifest as io
from headrace.runtime.core import Row

ShapeKey = tuple[tuple[int, int, int], ...]


def shape_key(rows: Sequence[Row]) -> ShapeKey:
    """Slot, new tokens and logits of each row."""
    return tuple([(row.slot, len(row.tokens), row.num_logits) for row in rows])


def wants_probabilities(rows: Sequence[Row]) -> bool:
    return any(row.num_logits and row.inverse_temperature for row in rows)


@dataclass(frozen=True, slots=True)
class StepIndices:
    """Index arrays of a step shape (names as in runtime.manifest). B slots from `first_slot`."""

    first_slot: int
    num_slots: int
    gather: NDArray[np.int64]
    scatter: NDArray[np.int64]
    query_seqlens: NDArray[np.int32]
    logits_index: NDArray[np.int64]


def step_indices(key: ShapeKey) -> StepIndices:
    """Indices of rows in ascending slot order; slots between them are idle."""
    first = key[0][0]
    num_slots = key[-1][0] - first + 1
    longest = max(tokens for _, tokens, _ in key)
    gather = np.zeros((num_slots, longest), np.int64)
    query_seqlens = np.zeros(num_slots, np.int32)
    scatter, logits, packed = [], [], 0
    for slot, tokens, num_logits in key:
        b = slot - first
        span = np.arange(packed, packed + tokens)
        gather[b, :tokens] = span
        scatter.append(b * longest + np.arange(tokens))
        logits.append(span[tokens - num_logits :])
        query_seqlens[b] = tokens
        packed += tokens
    return StepIndices(
        first,
        num_slots,
        gather,
        np.concatenate(scatter).astype(np.int64),
        query_seqlens,
        np.concatenate(logits).astype(np.int64),
    )


class BoundStep:
    """A step shape with all that it binds; `write` and `run`."""

    def __init__(
        self,
        stages: Sequence[Stage],
        key: ShapeKey,
        kv: KvStorage,
        logits_buffer: NDArray[np.float32],
        probabilities_buffer: Probabilities | None,
        hidden_size: int,
    ) -> None:
        """
        Args:
            stages: in their order.
            probabilities_buffer: where they go, if the step is to compute them.
        """
        indices = step_indices(key)
        self.num_stages = len(stages)
        self.num_logits = len(indices.logits_index)
        # A chunk in the middle of a prompt needs no logits; the graph computes one row anyway.
        logits_index = indices.logits_index if self.num_logits else np.zeros(1, np.int64)
        offsets = [slot - indices.first_slot for slot, _, _ in key]
        self._offsets = slice(None) if len(offsets) == indices.num_slots else np.array(offsets)
        self._ids = np.zeros(len(indices.scatter), np.int64)
        self._seqlens_k = np.zeros(indices.num_slots, np.int32)
        total = np.array(kv.capacity_tokens, np.int32)
        feeds: dict[str, NDArray[Any]] = {
            io.INPUT_IDS: self._ids,
            io.GATHER_INDEX: indices.gather,
            io.SCATTER_INDEX: indices.scatter,
            io.SEQLENS_K: self._seqlens_k,
            io.TOTAL_TOKENS: total,
            io.QUERY_SEQLENS: indices.query_seqlens,
            io.LOGITS_INDEX: logits_index,
            io.INVERSE_TEMPERATURE: np.zeros((len(logits_index), 1), np.float32),
        }
        self._inverse_temperatures = (
            None if probabilities_buffer is None else feeds[io.INVERSE_TEMPERATURE][:, 0]
        )
        rows = len(logits_index)
        outputs = {io.LOGITS: logits_buffer[:rows], io.ENTROPY: np.zeros(rows, np.float32)}
        if io.HIDDEN in stages[-1].outputs:
            outputs[io.HIDDEN] = np.zeros((rows, hidden_size), np.float32)
        probabilities = None
        if probabilities_buffer is not None:
            probabilities = probabilities_buffer.rows(slice(rows))
            outputs[io.PROBABILITIES] = probabilities.values
            outputs[io.BLOCK_MAXIMA] = probabilities.block_maxima
            outputs[io.BLOCK_SUMS] = probabilities.block_sums
        wanted = slice(self.num_logits)
        self._output = StepOutput(
            outputs[io.LOGITS][wanted],
            outputs[io.ENTROPY][wanted],
            0.0,
            None if probabilities is None else probabilities.rows(wanted),
            (),
            outputs[io.HIDDEN][wanted] if io.HIDDEN in outputs else None,
        )
        for name in [name for stage in stages for name in stage.crossing]:
            outputs[name] = np.empty((len(self._ids), hidden_size), np.float32)
        # The OrtValues share memory with these arrays, so both are kept.
        self._arrays = {**feeds, **outputs}
        value = load_onnxruntime().OrtValue.ortvalue_from_numpy
        self._tensors = {name: value(array) for name, array in self._arrays.items()}
        slots = indices.first_slot, indices.first_slot + indices.num_slots
        sampled = probabilities_buffer is not None
        self._bindings = [stage.binding(kv, *slots, sampled=sampled) for stage in stages]

    def run(self, options: Any = None) -> None:
        """One stage after the other; `options`: of ONNX Runtime."""
        for number in range(self.num_stages):
            self.run_stage(number, options)

    def run_stage(self, number: int, options: Any = None) -> None:
        self._bindings[number].run(self._tensors, options)

    def output(self, model_ms: float) -> StepOutput:
        """Of what was run; valid until a step of the same buffers runs its last stage."""
        return self._output._replace(model_ms=model_ms)

    def write(self, rows: Sequence[Row]) -> None:
        """Token ids and lengths of this step; the rows have the shape this was made for."""
        self._ids[:] = [token for row in rows for token in row.tokens]
        # Contract of the operator: past + new - 1; an idle slot's value is not looked at.
        self._seqlens_k[self._offsets] = [row.past_len + len(row.tokens) - 1 for row in rows]
        if self._inverse_temperatures is not None:
            self._inverse_temperatures[:] = [
                row.inverse_temperature for row in rows for _ in range(row.num_logits)
            ]
