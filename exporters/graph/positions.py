"""Positions of a step's tokens, computed in the graph for models that need them as numbers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from headrace.exporters.graph.builder import GraphBuilder
from headrace.exporters.graph.step_inputs import StepInputs
from headrace.runtime.manifest import MAX_ROW_TOKENS

_ROUNDING_TOKENS = 63  # backends make capacities multiples of up to 64


def emit_positions(g: GraphBuilder, step: StepInputs) -> ir.Value:
    """int64 [B, S]: of token i in slot b, past_len[b] + i. Padding counts on."""
    if step.position_ids is not None:
        return step.position_ids
    longest = g.op("Shape", step.gather, attributes={"start": 1, "end": 2})
    new = step.query_seqlens
    if new is None:  # every slot has as many new tokens as the longest row
        new = g.op("Cast", longest, attributes={"to": ir.DataType.INT32})
    before = g.op("Sub", step.seqlens_k, new)  # past_len - 1
    column = g.op("Unsqueeze", before, g.constant("axis_column", _ints(1)))
    past = g.op("Cast", column, attributes={"to": ir.DataType.INT64})
    end = g.op("Squeeze", longest, g.constant("axis_only", _ints(0)))
    one = g.constant("one_token", np.array(1, np.int64))
    span = g.op("Range", one, g.op("Add", end, one), one)
    return g.op("Add", past, span)


def emit_second_table(
    g: GraphBuilder, step: StepInputs, positions: ir.Value, switch_tokens: int, table_rows: int
) -> ir.Value:
    """Positions in a table that lies behind another of `table_rows`, where the context is longer
    than `switch_tokens`.

    A graph knows the capacity of slots, which is the context and room for a longest row, rounded
    up. All sequences of a session use the same table, so that keys in the cache fit to later
    queries.
    """
    room = min(switch_tokens, MAX_ROW_TOKENS) + _ROUNDING_TOKENS
    limit = g.constant("first_table_capacity", np.array(switch_tokens + room, np.int32))
    is_long = g.op("Greater", step.total, limit)
    offset = g.op("Cast", is_long, attributes={"to": ir.DataType.INT64})
    rows = g.constant("table_rows", np.array(table_rows, np.int64))
    return g.op("Add", positions, g.op("Mul", offset, rows))


def _ints(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)
