"""The graph of Medusa heads: hidden states in, the likeliest tokens of each head out.

It is a graph of its own, since only the states that texts go on from are known to be worth it: of a
row with drafts one, where the decoder graph would have to do all. States come as the decoder graph
gives them; in a rotated basis a block is

    x <- x + silu(x B W' + b) B^-1

with B from the graph's basis to that of the checkpoint (`DecoderParts.plain_basis`), so that the
model's output matrix can stay as the graph has it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from headrace.exporters.graph.activation import emit_activation
from headrace.exporters.graph.builder import GraphBuilder, graph_input, named_output
from headrace.exporters.graph.decoder import DecoderParts, soft_capped
from headrace.exporters.graph.linear import LinearFormat, Weight
from headrace.exporters.graph.weights import WeightStore
from headrace.exporters.heads.checkpoint import Block, Heads
from headrace.runtime import manifest as io

Float = NDArray[np.float32]


def build_heads(
    heads: Heads, parts: DecoderParts, fmt: LinearFormat, store: WeightStore
) -> ir.Model:
    """Build the graph for the decoder of `parts`; weights go to `store`."""
    return _Heads(heads, parts, fmt, GraphBuilder(store)).build()


class _Heads:
    def __init__(
        self, heads: Heads, parts: DecoderParts, fmt: LinearFormat, g: GraphBuilder
    ) -> None:
        self.heads, self.parts, self.fmt, self.g = heads, parts, fmt, g
        self.spec = parts.spec
        self.basis = None if parts.plain_basis is None else parts.plain_basis()

    def build(self) -> ir.Model:
        g, spec = self.g, self.spec
        hidden = graph_input(io.HIDDEN, ir.DataType.FLOAT, ["S", spec.hidden_size])
        count = graph_input(io.NUM_CANDIDATES, ir.DataType.INT64, [1])
        x = hidden
        if (matrix := self.parts.head_matrix) is not None:
            x = g.op("MatMul", hidden, g.weight(io.HEAD_MATRIX, matrix))
        states = []
        for number, head in enumerate(self.heads.heads):
            y = x
            for place, block in enumerate(head.blocks):
                with g.scope(f"head.{number}.{place}"):
                    y = self._block(y, block, f"{number}.{place}")
            states.append(y)
        logits = soft_capped(g, self._outputs(states), spec.logits_softcap)
        probabilities = g.op("Softmax", logits, attributes={"axis": -1})
        best, places = g.ops("TopK", probabilities, count, outputs=2, attributes={"axis": -1})
        if (token_map := self.heads.token_map) is not None:
            places = g.op("Gather", g.constant("token_map", token_map), places)
        shape = g.op(
            "Concat",
            g.constant("by_head", np.array([len(self.heads.heads), -1], np.int64)),
            count,
            attributes={"axis": 0},
        )
        names = (io.HEAD_TOKENS, io.HEAD_PROBABILITIES)
        types = (ir.DataType.INT64, ir.DataType.FLOAT)
        outputs = [
            named_output(g.op("Reshape", value, shape), name, dtype, ["K", "S", "C"])
            for value, name, dtype in zip((places, best), names, types, strict=True)
        ]
        return g.model([hidden, count], outputs, f"{spec.architecture}_heads")

    def _block(self, x: ir.Value, block: Block, name: str) -> ir.Value:
        g = self.g
        weight = self._weight(f"heads.{name}.linear", lambda: block.weight)
        bias = g.weight(f"heads.{name}.bias", lambda: block.bias)
        added = emit_activation(g, g.op("Add", self.fmt.linear(g, x, weight), bias), "silu")
        if self.basis is not None:
            back = self.basis[1]
            added = g.op("MatMul", added, g.weight("heads.back", lambda: back))
        return g.op("Add", x, added)

    def _outputs(self, states: list[ir.Value]) -> ir.Value:
        """Logits [K * S, tokens], the states of the first head first."""
        g, heads = self.g, self.heads.heads
        if all(head.output is None for head in heads):
            g.next_row_set()
            return self._output(g.op("Concat", *states, attributes={"axis": 0}), None, "shared")
        logits = []
        for number, (head, state) in enumerate(zip(heads, states, strict=True)):
            logits.append(self._output(state, head.output, str(number)))
        return g.op("Concat", *logits, attributes={"axis": 0})

    def _output(self, x: ir.Value, own: Float | None, name: str) -> ir.Value:
        """Logits of the tokens that heads choose among, from an own matrix or the model's."""
        g, spec = self.g, self.spec
        token_map = self.heads.token_map
        chosen = slice(None) if token_map is None else token_map
        size = spec.vocab_size if token_map is None else len(token_map)
        full = f"heads.{name}.output"
        if own is not None:
            weight = self._weight(full, lambda: own[chosen], size)
        else:
            model = self.parts.weight(spec.head)
            load = lambda: np.asarray(model.load()[chosen], np.float32)  # noqa: E731
            weight = _plain_weight(full, (size, spec.hidden_size), load)
        if spec.logits_scale != 1:
            scale = np.array(spec.logits_scale, np.float32)
            x = g.op("Mul", x, g.constant("logits_scale", scale))
        return self.fmt.linear(g, x, weight)

    def _weight(self, name: str, load: Callable[[], Float], rows: int | None = None) -> Weight:
        """A matrix [rows, hidden] for states of the checkpoint, for those of the graph."""
        size = self.spec.hidden_size

        def turned() -> Float:
            values = load()
            return values if self.basis is None else np.asarray(values @ self.basis[0].T)

        return _plain_weight(name, (rows or size, size), turned)


def _plain_weight(name: str, shape: tuple[int, int], load: Callable[[], Float]) -> Weight:
    return Weight(name, shape, load, lambda: None)
