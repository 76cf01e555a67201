"""The encoder graph: packed tokens of several texts in, their last hidden states out.

As in the decoder, everything but attention works on `[N, hidden]`, N = all tokens of a call;
around attention the rows are gathered into `[B, S, .]` and back. Texts of a call have about the
same length, so little of that is padding.

Attention is the standard operator of opset 24 with a number of tokens a text. On one node (2 cores,
AVX2, 12 heads of 32, 256 tokens in all) it takes 0.66 to 0.88x of MultiHeadAttention with lengths,
texts of 8 to 256 tokens, and at most 1.15x of itself without any mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from headrace.exporters.archs.encoder_spec import EncoderSpec
from headrace.exporters.graph.builder import MICROSOFT, GraphBuilder, graph_input, named_output
from headrace.exporters.graph.linear import LinearFormat, Weight
from headrace.exporters.graph.weights import WeightStore
from headrace.runtime.encoder import manifest as io

Float = NDArray[np.float32]
_OPSET = 24  # first whose Attention takes a number of tokens a row


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderParts:
    """What a graph is built from.

    Attributes:
        weight: finds checkpoint tensors; the names are stacked along their outputs.
        vector: reads a one-dimensional tensor, float32 [n].
        format: of every matrix.
        first_token_only: give the state of each text's first token, not of every token.
    """

    spec: EncoderSpec
    weight: Callable[..., Weight]
    vector: Callable[[str], Float]
    format: LinearFormat
    first_token_only: bool


def build_encoder(
    parts: EncoderParts,
    store: WeightStore,
    on_layer: Callable[[int], None] = lambda layers_done: None,
) -> ir.Model:
    """Build the graph; weights go to `store`."""
    return _Encoder(parts, GraphBuilder(store)).build(on_layer)


class _Encoder:
    """Builds the layers in order."""

    def __init__(self, parts: EncoderParts, g: GraphBuilder) -> None:
        self.parts, self.spec, self.g = parts, parts.spec, g
        int64 = ir.DataType.INT64
        self.ids = graph_input(io.INPUT_IDS, int64, ["N"])
        self.positions = graph_input(io.POSITION_IDS, int64, ["N"])
        self.gather = graph_input(io.GATHER_INDEX, int64, ["B", "S"])
        self.scatter = graph_input(io.SCATTER_INDEX, int64, ["N"])
        self.lengths = graph_input(io.LENGTHS, int64, ["B"])
        self.first_tokens = graph_input(io.FIRST_TOKENS, int64, ["B"])

    def build(self, on_layer: Callable[[int], None]) -> ir.Model:
        spec, g = self.spec, self.g
        with g.scope("embed"):
            x = self._embed()
        for layer in range(spec.num_layers):
            with g.scope(f"layers.{layer}"):
                x = self._layer(layer, x)
            on_layer(layer + 1)
        inputs = [self.ids, self.positions, self.gather, self.scatter, self.lengths]
        if self.parts.first_token_only:
            inputs.append(self.first_tokens)
        rows = "B" if self.parts.first_token_only else "N"
        states = named_output(x, io.STATES, ir.DataType.FLOAT, [rows, spec.hidden_size])
        return g.model(inputs, [states], f"{spec.architecture}_encoder", opset=_OPSET)

    def _embed(self) -> ir.Value:
        spec, g = self.spec, self.g
        words = self.parts.format.embed(g, self.ids, self.parts.weight(spec.word))
        table = g.weight(f"{spec.position}.weight", self._position_table)
        g.store.describe(f"{spec.position}.weight", (spec.max_tokens, spec.hidden_size), "fp32")
        places = g.op("Gather", table, self.positions)
        return self._skip_norm(words, places, spec.embedding_norm)

    def _position_table(self) -> Float:
        """float32 [max_tokens, hidden]: from the first token's on, with the segment added."""
        spec = self.spec
        table = self.parts.weight(spec.position).load()[spec.first_position :]
        if spec.token_type is not None:
            table = table + self.parts.weight(spec.token_type).load()[0]
        return np.ascontiguousarray(table)

    def _layer(self, layer: int, x: ir.Value) -> ir.Value:
        spec, g, names = self.spec, self.g, self.spec.layer
        with g.scope("attention"):
            attended = self._attention(layer, x)
            if layer == spec.num_layers - 1 and self.parts.first_token_only:
                attended = g.op("Gather", attended, self.first_tokens)
                x = g.op("Gather", x, self.first_tokens)
                g.next_row_set()
            output = names.output.format(layer)
            y = self._linear(attended, output)
            x = self._skip_norm(y, x, names.attention_norm.format(layer), self._bias(output))
        with g.scope("mlp"):
            inner, outer = names.inner.format(layer), names.outer.format(layer)
            y = self._linear(self._activate(self._linear(x, inner), self._bias(inner)), outer)
            return self._skip_norm(y, x, names.mlp_norm.format(layer), self._bias(outer))

    def _attention(self, layer: int, x: ir.Value) -> ir.Value:
        """float32 [N, hidden] -> [N, hidden]."""
        spec, g, names = self.spec, self.g, self.spec.layer
        stacked = [n.format(layer) for n in (names.query, names.key, names.value)]
        qkv = g.op("Add", self._linear(x, *stacked), self._bias(*stacked))
        padded = g.op("Gather", qkv, self.gather)
        query, key, value = g.ops(
            "Split", padded, outputs=3, attributes={"axis": 2, "num_outputs": 3}
        )
        attributes = {
            "q_num_heads": spec.num_heads,
            "kv_num_heads": spec.num_heads,
            "scale": 1 / math.sqrt(spec.hidden_size // spec.num_heads),
        }
        inputs = (query, key, value, None, None, None, self.lengths)
        attended = g.op("Attention", *inputs, attributes=attributes)
        shape = g.constant("flat_heads", np.array([-1, spec.hidden_size], np.int64))
        return g.op("Gather", g.op("Reshape", attended, shape), self.scatter)

    def _activate(self, x: ir.Value, bias: ir.Value) -> ir.Value:
        g = self.g
        if self.spec.activation == "gelu":
            return g.op("BiasGelu", x, bias, domain=MICROSOFT)
        x = g.op("Add", x, bias)
        if self.spec.activation == "relu":
            return g.op("Relu", x)
        return g.op("Gelu", x, attributes={"approximate": "tanh"})

    def _linear(self, x: ir.Value, *names: str) -> ir.Value:
        return self.parts.format.linear(self.g, x, self.parts.weight(*names))

    def _skip_norm(
        self, x: ir.Value, residual: ir.Value, name: str, bias: ir.Value | None = None
    ) -> ir.Value:
        """LayerNorm(x + residual + bias)."""
        parts = [self._vector(f"{name}.{part}") for part in ("weight", "bias")]
        inputs = [x, residual, *parts] + ([] if bias is None else [bias])
        attributes = {"epsilon": self.spec.norm_eps}
        return self.g.op("SkipLayerNormalization", *inputs, domain=MICROSOFT, attributes=attributes)

    def _bias(self, *names: str) -> ir.Value:
        return self._vector(*(f"{name}.bias" for name in names))

    def _vector(self, *names: str) -> ir.Value:
        """Vectors, joined; kept in float32."""
        whole = "+".join(names)
        stored = self.g.weight(
            whole, lambda: np.concatenate([self.parts.vector(name) for name in names])
        )
        assert stored.shape is not None
        self.g.store.describe(whole, stored.shape.numpy(), "fp32")
        return stored
