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

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from headrace.exporters.archs.spec import DecoderSpec
from headrace.exporters.graph.builder import MICROSOFT, GraphBuilder, graph_input, named_output
from headrace.exporters.graph.linear import Bias, LinearFormat, MlpWeights, Weight, add_bias
from headrace.exporters.graph.probabilities import emit_probabilities
from headrace.exporters.graph.rope import rope_tables
from headrace.exporters.graph.weights import WeightStore
from headrace.runtime import manifest as io

FORMS = ("ragged", "uniform", "tree")

Float = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class KvScales:
    """Scales of a quantized cache: value = code * scale. float32 [layers, kv_heads, head_dim] each.

    `bits` is 8 or 4; two 4-bit codes share a byte.
    """

    key: Float
    value: Float
    bits: int = 8


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


@dataclass(frozen=True, slots=True)
class _StepInputs:
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


def build_decoder(
    parts: DecoderParts,
    store: WeightStore,
    form: str,
    on_layer: Callable[[int], None] = lambda layers_done: None,
) -> ir.Model:
    """Build one form; weights go to `store` unless an earlier form put them there."""
    assert form in FORMS
    return _Decoder(parts, GraphBuilder(store), _step_inputs(form)).build(form, on_layer)


def _step_inputs(form: str) -> _StepInputs:
    int32, int64, float32 = ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT
    ragged, tree = form != "uniform", form == "tree"
    return _StepInputs(
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


class _Decoder:
    """Builds the layers in order, carrying the residual stream from one to the next."""

    def __init__(self, parts: DecoderParts, g: GraphBuilder, step: _StepInputs) -> None:
        self.parts, self.spec, self.g, self.step = parts, parts.spec, g, step
        self.cache_inputs: list[ir.Value] = []
        self.cache_outputs: list[ir.Value] = []
        # Rows of packed positions beyond the context can occur as padding of the longest row.
        positions = self.spec.context_tokens + io.MAX_ROW_TOKENS
        tables = cache(lambda: rope_tables(self.spec, positions))
        self.cos = g.weight("rope.cos", lambda: tables()[0])
        self.sin = g.weight("rope.sin", lambda: tables()[1])

    def build(self, form: str, on_layer: Callable[[int], None]) -> ir.Model:
        spec, g, step = self.spec, self.g, self.step
        ids = graph_input(io.INPUT_IDS, ir.DataType.INT64, ["N"])
        with g.scope("embed"):
            residual = self.parts.head_format.embed(g, ids, self.parts.weight(spec.embed))
        with g.scope("layers.0"):
            normed = self._first_norm(residual, spec.layer.attention_norm.format(0))
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
            [ids, *step.all(), *self.cache_inputs],
            [*outputs, *self.cache_outputs],
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
            output = self._linear(attended, names.output.format(layer), bias=spec.attention_bias)
        with g.scope("mlp"):
            normed, residual = self._skip_norm(output, residual, names.mlp_norm.format(layer))
            output = self._mlp(layer, normed)
        following = spec.final_norm if last else names.attention_norm.format(layer + 1)
        return self._skip_norm(output, residual, following)

    def _attention(self, layer: int, normed: ir.Value) -> ir.Value:
        """float32 [N, hidden] -> [N, heads * head_dim]."""
        spec, g, step, names = self.spec, self.g, self.step, self.spec.layer
        stacked = [n.format(layer) for n in (names.query, names.key, names.value)]
        qkv = self._linear(normed, *stacked, bias=spec.attention_bias)
        past_key, past_value = self._cache_inputs(layer)
        key_scale, value_scale = self._cache_scales(layer)
        inputs = [
            g.op("Gather", qkv, step.gather),
            None,
            None,
            past_key,
            past_value,
            step.seqlens_k,
            step.total,
            self.cos,
            self.sin,
            step.position_ids,
            step.attention_bias,
            None,
            key_scale,
            value_scale,
            None,
            None,
            step.query_seqlens,
        ]
        while inputs[-1] is None:
            inputs.pop()
        attributes: dict[str, int | float | str] = {
            "num_heads": spec.num_heads,
            "kv_num_heads": spec.num_kv_heads,
            "scale": 1 / math.sqrt(spec.head_dim),
            "do_rotary": 1,
        }
        if self.parts.kv_scales is not None:
            attributes |= {
                "k_quant_type": "PER_CHANNEL",
                "v_quant_type": "PER_CHANNEL",
                "kv_cache_bit_width": self.parts.kv_scales.bits,
            }
        attended, key, value = g.ops(
            "GroupQueryAttention", *inputs, outputs=3, domain=MICROSOFT, attributes=attributes
        )
        self._cache_outputs(layer, key, value)
        flat = g.op("Reshape", attended, g.constant("flat_heads", self._flat_heads()))
        return g.op("Gather", flat, step.scatter)

    def _mlp(self, layer: int, normed: ir.Value) -> ir.Value:
        names, weight = self.spec.layer, self.parts.weight
        gate, up, down = (n.format(layer) for n in (names.gate, names.up, names.down))
        bias = self._bias if self.spec.mlp_bias else lambda *_: None
        weights = MlpWeights(
            gate=weight(gate),
            up=weight(up),
            gate_up=weight(gate, up),
            down=weight(down),
            gate_up_bias=bias(gate, up),
            down_bias=bias(down),
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
            emit = formats.tied_head if spec.tied_embeddings else formats.linear
            logits = emit(g, hidden, weight)
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

    def _first_norm(self, x: ir.Value, name: str) -> ir.Value:
        attributes = {"epsilon": self.spec.rms_eps, "axis": -1, "stash_type": 1}
        return self.g.op("RMSNormalization", x, self._gain(name), attributes=attributes)

    def _skip_norm(self, x: ir.Value, residual: ir.Value, name: str) -> tuple[ir.Value, ir.Value]:
        """RMSNorm(x + residual) and x + residual."""
        normed, mean, deviation, total = self.g.ops(
            "SkipSimplifiedLayerNormalization",
            x,
            residual,
            self._gain(name),
            outputs=4,
            domain=MICROSOFT,
            attributes={"epsilon": self.spec.rms_eps},
        )
        mean.name = deviation.name = ""  # an output without a name is not computed
        return normed, total

    def _gain(self, name: str) -> ir.Value:
        stored = self.g.weight(f"{name}.weight", lambda: self.parts.vector(f"{name}.weight"))
        self.g.store.describe(f"{name}.weight", (self.spec.hidden_size,), "fp32")
        return stored

    def _cache_inputs(self, layer: int) -> tuple[ir.Value, ir.Value]:
        key, value = (
            graph_input(name.format(layer), self._cache_dtype, self._cache_shape)
            for name in (io.PAST_KEY, io.PAST_VALUE)
        )
        self.cache_inputs += [key, value]
        return key, value

    def _cache_outputs(self, layer: int, key: ir.Value, value: ir.Value) -> None:
        for tensor, name in ((key, io.PRESENT_KEY), (value, io.PRESENT_VALUE)):
            self.cache_outputs.append(
                named_output(tensor, name.format(layer), self._cache_dtype, self._cache_shape)
            )

    def _cache_scales(self, layer: int) -> tuple[ir.Value | None, ir.Value | None]:
        scales = self.parts.kv_scales
        if scales is None:
            return None, None
        shape = (1, self.spec.num_kv_heads, 1, self.spec.head_dim)
        return (
            self.g.weight(f"kv_scale.key.{layer}", lambda: scales.key[layer].reshape(shape)),
            self.g.weight(f"kv_scale.value.{layer}", lambda: scales.value[layer].reshape(shape)),
        )

    @property
    def _cache_dtype(self) -> ir.DataType:
        scales = self.parts.kv_scales
        if scales is None:
            return ir.DataType.FLOAT
        return ir.DataType.INT8 if scales.bits == 8 else ir.DataType.UINT8

    @property
    def _cache_shape(self) -> list[int | str]:
        scales = self.parts.kv_scales
        packed = 1 if scales is None else 8 // scales.bits  # values to an element
        return ["B", self.spec.num_kv_heads, "C", self.spec.head_dim // packed]

    def _flat_heads(self) -> NDArray[np.int64]:
        return np.array([-1, self.spec.num_heads * self.spec.head_dim], np.int64)
