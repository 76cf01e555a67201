"""The decoder graph: packed tokens in, logits and entropy of the rows asked for out.

Everything but attention works on `[N, hidden]`, N = all new tokens of a step. Around
GroupQueryAttention the packed rows are gathered into `[B, S, .]` and back; `gather_index` and
`scatter_index` are inputs. Padding never enters a GEMM.

Three forms share one weight file:
    ragged   every slot has its own past and number of new tokens (`query_seqlens`)
    uniform  for onnxruntime without that input: one new token a slot, or one slot
    tree     ragged, with `position_ids` and `attention_bias` for branching drafts
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from headrace.exporters.archs.spec import DecoderSpec
from headrace.exporters.graph.attention import Attention, KvScales
from headrace.exporters.graph.builder import MICROSOFT, GraphBuilder, graph_input, named_output
from headrace.exporters.graph.linear import Bias, LinearFormat, MlpWeights, Weight, add_bias
from headrace.exporters.graph.positions import emit_positions
from headrace.exporters.graph.probabilities import emit_probabilities
from headrace.exporters.graph.step_inputs import StepInputs, step_inputs
from headrace.exporters.graph.weights import WeightStore
from headrace.runtime import manifest as io

FORMS = ("ragged", "uniform", "tree")

Float = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderParts:
    """What a graph is built from.

    Attributes:
        weight: finds checkpoint tensors; the names are stacked along their outputs.
        vector: reads a one-dimensional tensor, float32 [n].
        layer_format: for attention and MLP; `head_format` for the embedding and the head.
        kv_scales: a quantized cache, or None for float32.
        head_matrix: float32 [hidden, hidden] that the last hidden state is multiplied with before
            the head, or None.
    """

    spec: DecoderSpec
    weight: Callable[..., Weight]
    vector: Callable[[str], Float]
    layer_format: LinearFormat
    head_format: LinearFormat
    kv_scales: KvScales | None
    head_matrix: Callable[[], Float] | None = None


def build_decoder(
    parts: DecoderParts,
    store: WeightStore,
    form: str,
    on_layer: Callable[[int], None] = lambda layers_done: None,
) -> ir.Model:
    """Build one form; weights go to `store` unless an earlier form put them there."""
    assert form in FORMS
    return _Decoder(parts, GraphBuilder(store), step_inputs(form)).build(form, on_layer)


class _Decoder:
    """Builds the layers in order, carrying the residual stream from one to the next."""

    def __init__(self, parts: DecoderParts, g: GraphBuilder, step: StepInputs) -> None:
        self.parts, self.spec, self.g, self.step = parts, parts.spec, g, step
        self.attention = Attention(parts.spec, parts.kv_scales, g, step, self._vector)

    def build(self, form: str, on_layer: Callable[[int], None]) -> ir.Model:
        spec, g, step = self.spec, self.g, self.step
        ids = graph_input(io.INPUT_IDS, ir.DataType.INT64, ["N"])
        with g.scope("embed"):
            residual = self._embed(ids)
        with g.scope("layers.0"):
            normed = self._norm(residual, spec.layer.attention_norm, 0)
        for layer in range(spec.num_layers):
            with g.scope(f"layers.{layer}"):
                normed, residual = self._layer(layer, normed, residual)
            on_layer(layer + 1)
        logits, entropy = self._head(normed)
        with g.scope("sampling"):
            sampling = emit_probabilities(g, logits, step.inverse_temperature, spec.vocab_size)
        float32 = ir.DataType.FLOAT
        outputs = [
            named_output(logits, io.LOGITS, float32, ["R", spec.vocab_size]),
            named_output(entropy, io.ENTROPY, float32, ["R"]),
            *(
                named_output(value, name, float32, ["P", "W"])
                for value, name in zip(
                    sampling, (io.PROBABILITIES, io.BLOCK_MAXIMA, io.BLOCK_SUMS), strict=True
                )
            ),
            named_output(normed, io.HIDDEN, float32, ["R", spec.hidden_size]),
        ]
        return g.model(
            [ids, *step.all(), *self.attention.cache_inputs],
            [*outputs, *self.attention.cache_outputs],
            f"{spec.architecture}_{form}",
        )

    def _layer(self, layer: int, normed: ir.Value, residual: ir.Value) -> tuple[ir.Value, ir.Value]:
        """One layer; returns what the next one starts from, normed and not."""
        spec, g, names = self.spec, self.g, self.spec.layer
        last = layer == spec.num_layers - 1
        with g.scope("attention"):
            attended = self._attention(layer, normed)
            if last:
                # Only rows whose logits are wanted go on from here.
                attended = g.op("Gather", attended, self.step.logits_index)
                residual = g.op("Gather", residual, self.step.logits_index)
                g.next_row_set()
            output = self._linear(attended, names.output.format(layer), bias=spec.output_bias)
            output = self._added(self._norm(output, names.attention_post_norm, layer))
        with g.scope("mlp"):
            normed, residual = self._skip_norm(output, residual, names.mlp_norm, layer)
            output = self._mlp(layer, normed)
            output = self._added(self._norm(output, names.mlp_post_norm, layer))
        following = spec.final_norm if last else names.attention_norm
        return self._skip_norm(output, residual, following, layer + 1)

    def _embed(self, ids: ir.Value) -> ir.Value:
        spec, g = self.spec, self.g
        x = self.parts.head_format.embed(g, ids, self.parts.weight(spec.embed))
        x = self._scaled(x, "embedding_scale", spec.embedding_scale)
        if (name := spec.positions) is None:
            return x
        full = f"{name}.weight"
        g.store.describe(full, (spec.context_tokens, spec.hidden_size), "fp32")
        learned = g.weight(full, lambda: self.parts.weight(name).load())
        flat = g.op("Reshape", emit_positions(g, self.step), g.constant("flat", _ints(-1)))
        return g.op("Add", x, g.op("Gather", learned, g.op("Gather", flat, self.step.scatter)))

    def _attention(self, layer: int, normed: ir.Value) -> ir.Value:
        """float32 [N, hidden] -> [N, heads * head_dim]."""
        names = self.spec.layer
        stacked = [n.format(layer) for n in (names.query, names.key, names.value)]
        return self.attention.attend(layer, self._linear(normed, *stacked, bias=self.spec.qkv_bias))

    def _mlp(self, layer: int, normed: ir.Value) -> ir.Value:
        names, weight = self.spec.layer, self.parts.weight
        up, down = names.up.format(layer), names.down.format(layer)
        first = [up] if names.gate is None else [names.gate.format(layer), up]
        bias = self._bias if self.spec.mlp_bias else lambda *_: None
        weights = MlpWeights(
            gate=None if names.gate is None else weight(first[0]),
            up=weight(up),
            gate_up=weight(*first),
            down=weight(down),
            gate_up_bias=bias(*first),
            down_bias=bias(down),
            activation=self.spec.activation,
        )
        return self.parts.layer_format.gated_mlp(self.g, normed, weights)

    def _head(self, hidden: ir.Value) -> tuple[ir.Value, ir.Value]:
        """float32 [R, hidden] -> logits [R, vocab], entropy in nats [R].

        H = -sum p log p; log p comes from LogSoftmax, since sum p x loses 4 digits to
        cancellation.
        """
        spec, g, formats = self.spec, self.g, self.parts.head_format
        weight = self.parts.weight(spec.head)
        with g.scope("head"):
            if (matrix := self.parts.head_matrix) is not None:
                hidden = g.op("MatMul", hidden, g.weight(io.HEAD_MATRIX, matrix))
                g.store.describe(io.HEAD_MATRIX, (spec.hidden_size, spec.hidden_size), "fp32")
            hidden = self._scaled(hidden, "logits_scale", spec.logits_scale)
            emit = formats.tied_head if spec.tied_embeddings else formats.linear
            logits = emit(g, hidden, weight)
            if spec.logits_softcap is not None:
                capped = self._scaled(logits, "logits_softcap_inverse", 1 / spec.logits_softcap)
                capped = g.op("Tanh", capped)
                logits = self._scaled(capped, "logits_softcap", spec.logits_softcap)
            log_p = g.op("LogSoftmax", logits, attributes={"axis": -1})
            last = g.constant("axis_last", np.array([-1], np.int64))
            weighted = g.op("Mul", g.op("Exp", log_p), log_p)
            total = g.op("ReduceSum", weighted, last, attributes={"keepdims": 0})
            return logits, g.op("Neg", total)

    def _linear(self, x: ir.Value, *names: str, bias: bool) -> ir.Value:
        y = self.parts.layer_format.linear(self.g, x, self.parts.weight(*names))
        return add_bias(self.g, y, self._bias(*names) if bias else None)

    def _bias(self, *names: str) -> Bias:
        stacked = [f"{name}.bias" for name in names]
        return Bias(
            "+".join(stacked), lambda: np.concatenate([self.parts.vector(n) for n in stacked])
        )

    def _scaled(self, x: ir.Value, name: str, factor: float) -> ir.Value:
        if factor == 1:
            return x
        return self.g.op("Mul", x, self.g.constant(name, np.array(factor, np.float32)))

    def _added(self, x: ir.Value) -> ir.Value:
        """What the residual stream has added of x."""
        return self._scaled(x, "residual_scale", self.spec.residual_scale)

    def _norm(self, x: ir.Value, name: str | None, layer: int) -> ir.Value:
        """The norm of x, or x where there is none."""
        if name is None:
            return x
        attributes = {"epsilon": self.spec.norm_eps, "axis": -1, "stash_type": 1}
        kind = "LayerNormalization" if self.spec.norm == "layer" else "RMSNormalization"
        return self.g.op(kind, x, *self._norm_weights(name.format(layer)), attributes=attributes)

    def _skip_norm(
        self, x: ir.Value, residual: ir.Value, name: str | None, layer: int
    ) -> tuple[ir.Value, ir.Value]:
        """The norm of x + residual, and x + residual."""
        if name is None:
            total = self.g.op("Add", x, residual)
            return total, total
        kind = "Skip" if self.spec.norm == "layer" else "SkipSimplified"
        normed, mean, deviation, total = self.g.ops(
            f"{kind}LayerNormalization",
            x,
            residual,
            *self._norm_weights(name.format(layer)),
            outputs=4,
            domain=MICROSOFT,
            attributes={"epsilon": self.spec.norm_eps},
        )
        mean.name = deviation.name = ""  # an output without a name is not computed
        return normed, total

    def _norm_weights(self, name: str) -> list[ir.Value]:
        kinds = ("weight", "bias") if self.spec.norm == "layer" else ("weight",)
        return [self._vector(f"{name}.{kind}") for kind in kinds]

    def _vector(self, name: str) -> ir.Value:
        """Kept in float32."""
        stored = self.g.weight(name, lambda: self.parts.vector(name))
        assert stored.shape is not None
        self.g.store.describe(name, stored.shape.numpy(), "fp32")
        return stored


def _ints(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)
