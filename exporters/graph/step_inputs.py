"""Graph inputs of a step, besides token ids and the cache."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from headrace.exporters.graph.builder import graph_input
from headrace.runtime import manifest as io


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Graph inputs that every layer uses; None where the form has none."""

    gather: ir.Value
    scatter: ir.Value
    seqlens_k: ir.Value
    total: ir.Value
    logits_index: ir.Value
    inverse_temperature: ir.Value
    query_seqlens: ir.Value | None
    position_ids: ir.Value | None
    attention_bias: ir.Value | None

    def all(self) -> list[ir.Value]:
        indices = (self.gather, self.scatter, self.seqlens_k, self.total, self.logits_index)
        named = (*indices, self.inverse_temperature)
        optional = (self.query_seqlens, self.position_ids, self.attention_bias)
        return [*named, *(value for value in optional if value is not None)]


def step_inputs(form: str) -> StepInputs:
    """Of a form of `graph.decoder.FORMS`."""
    int32, int64, float32 = ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT
    ragged, tree = form != "uniform", form == "tree"
    return StepInputs(
        gather=graph_input(io.GATHER_INDEX, int64, ["B", "S"]),
        scatter=graph_input(io.SCATTER_INDEX, int64, ["N"]),
        seqlens_k=graph_input(io.SEQLENS_K, int32, ["B"]),
        total=graph_input(io.TOTAL_TOKENS, int32, []),
        logits_index=graph_input(io.LOGITS_INDEX, int64, ["R"]),
        inverse_temperature=graph_input(io.INVERSE_TEMPERATURE, float32, ["R", 1]),
        query_seqlens=graph_input(io.QUERY_SEQLENS, int32, ["B"]) if ragged else None,
        position_ids=graph_input(io.POSITION_IDS, int64, ["B", "S"]) if tree else None,
        attention_bias=(
            graph_input(io.ATTENTION_BIAS, float32, ["B", 1, "S", "T"]) if tree else None
        ),
    )
