"""Probabilities for sampling, computed in the graph for steps that ask for them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from headrace.exporters.graph.builder import GraphBuilder
from headrace.runtime.manifest import PROBABILITY_BLOCK


def emit_probabilities(
    g: GraphBuilder, logits: ir.Value, inverse_temperature: ir.Value, vocab_size: int
) -> tuple[ir.Value, ...]:
    """softmax(logits * inverse_temperature), only where some row has a temperature.

    Beside them the largest and the sum of every block of `PROBABILITY_BLOCK` tokens, so that the
    host need not read a whole vocabulary: 6 us a row here, and a multiple of that over there, where
    the row comes cold from another core's cache.

    Args:
        logits: float32 [R, vocab].
        inverse_temperature: float32 [R, 1].

    Returns:
        float32 [P, blocks * PROBABILITY_BLOCK], zero beyond the vocabulary, then twice
        [P, blocks]: maxima and sums. P is R, or 0 where no row has a temperature.
    """
    blocks = -(-vocab_size // PROBABILITY_BLOCK)
    missing = blocks * PROBABILITY_BLOCK - vocab_size
    axes = g.constant("axes_all", np.array([0, 1], np.int64))
    highest = g.op("ReduceMax", inverse_temperature, axes, attributes={"keepdims": 0})
    wanted = g.op("Greater", highest, g.constant("zero", np.array(0, np.float32)))
    grouped = g.constant("blocks", np.array([0, blocks, PROBABILITY_BLOCK], np.int64))
    last = g.constant("axis_block", np.array([2], np.int64))
    padding = g.constant("padding", np.array([0, 0, 0, missing], np.int64))

    def compute(tape: ir.tape.Tape) -> list[ir.Value]:
        scaled = tape.op("Mul", [logits, inverse_temperature])
        values = tape.op("Softmax", [scaled], {"axis": -1})
        if missing:
            values = tape.op("Pad", [values, padding])
        by_block = tape.op("Reshape", [values, grouped])
        reduced = [
            tape.op(kind, [by_block, last], {"keepdims": 0}) for kind in ("ReduceMax", "ReduceSum")
        ]
        return [values, *reduced]

    def skip(tape: ir.tape.Tape) -> list[ir.Value]:
        widths = (blocks * PROBABILITY_BLOCK, blocks, blocks)
        empty = [ir.tensor(np.zeros((0, width), np.float32)) for width in widths]
        return [tape.op("Constant", [], {"value": tensor}) for tensor in empty]

    return tuple(g.branch(wanted, compute, skip))
