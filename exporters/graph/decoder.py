"""The decoder graph: packed tokens in, logits and entropy of the rows asked for out.

Everything but attention works on `[N, hidden]`, N = all new tokens of a step. Around
GroupQueryAttention the packed rows are gathered into `[B, S, .]` and back; `gather_index` and
`scatter_index` are inputs. Padding never enters a GEMM.

Three forms for the CPU share one weight file:
    ragged   every slot has its own past and number of new tokens (`query_seqlens`)
    uniform  for onnxruntime without that input: one new token a slot, or one slot
    tree     ragged, with `position_ids` and `attention_bias` for branching drafts

The form `paged`, for CUDA, works in float16 and keeps packed tokens packed in attention, too: keys
and values lie in a pool of blocks (`graph/paged.py`). Norms, logits and entropy are float32. It
gives the likeliest token beside them, and no probabilities: they would need control flow, which
CUDA graphs cannot hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from headrace.exporters.archs.spec import DecoderSpec
from headrace.exporters.graph.attention import Attention, KvScales
from headrace.exporters.graph.builder import GraphBuilder, graph_input, named_output
from headrace.exporters.graph.linear import Bias, LinearFormat, MlpWeights, Weight, add_bias
from headrace.exporters.graph.norms import Norms
from headrace.exporters.graph.paged import PagedAttention, PagedInputs, paged_inputs
from headrace.exporters.graph.positions import emit_positions
from headrace.exporters.graph.probabilities import emit_probabilities
from headrace.exporters.graph.step_inputs import StepInputs, step_inputs
from headrace.exporters.graph.weights import WeightStore
from headrace.runtime import manifest as io

FORMS = ("ragged", "uniform", "tree")
PAGED = "paged"

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
        adds_biases: False where another rank has the biases of what ranks sum up.
        plain_basis: matrices [hidden, hidden] that turn states before the head, as rows, into those
            of the checkpoint, and back; None where they are these.
    """

    spec: DecoderSpec
    weight: Callable[..., Weight]
    vector: Callable[[str], Float]
    layer_format: LinearFormat
    head_format: LinearFormat
    kv_scales: KvScales | None
    head_matrix: Callable[[], Float] | None = None
    adds_biases: bool = True
    plain_basis: Callable[[], tuple[Float, Float]] | None = None


def build_decoder(
    parts: DecoderParts,
    store: WeightStore,
    form: str,
    on_layer: Callable[[int], None] = lambda layers_done: None,
    layers: range | None = None,
) -> ir.Model:
    """Build one form; weights go to `store` unless an earlier form put them there.

    Args:
        layers: of one stage out of several; all of them unless given.
    """
    layers = range(parts.spec.num_layers) if layers is None else layers
    return decoder_of(parts, store, form).build(form, on_layer, layers)


def decoder_of(parts: DecoderParts, store: WeightStore, form: str) -> Decoder:
    """What emits one form."""
    assert form in FORMS or form == PAGED
    if form == PAGED:
        learned = parts.spec.positions is not None
        half = GraphBuilder(store, np.float16)
        return Decoder(parts, half, paged_inputs(learned_positions=learned))
    return Decoder(parts, GraphBuilder(store), step_inputs(form))


class Decoder:
    """Emits a decoder piece by piece. Where tensor parallelism sums over its ranks, a piece ends:
    after `looked_up`, `attended` and `mlp`.

    Args:
        step: of the form that is built.
    """

    def __init__(
        self, parts: DecoderParts, g: GraphBuilder, step: StepInputs | PagedInputs
    ) -> None:
        self.parts, self.spec, self.g, self.step = parts, parts.spec, g, step
        self.norms = Norms(parts.spec, g, self._vector)

    @cached_property
    def attention(self) -> Attention | PagedAttention:
        parts, g, step = self.parts, self.g, self.step
        if isinstance(step, PagedInputs):
            assert parts.kv_scales is None and parts.head_matrix is None
            return PagedAttention(parts.spec, g, step, self.norms, parts.vector)
        return Attention(parts.spec, parts.kv_scales, g, step, self.norms)

    def build(self, form: str, on_layer: Callable[[int], None], layers: range) -> ir.Model:
        spec, g, step = self.spec, self.g, self.step
        if layers.start == 0:
            inputs = [graph_input(io.INPUT_IDS, ir.DataType.INT64, ["N"])]
            normed, residual = self.embedded(self.looked_up(inputs[0]))
        else:
            names = self._crossing_names(layers.start)
            inputs = [graph_input(name, self.dtype, ["N", spec.hidden_size]) for name in names]
            residual, normed = inputs[0], inputs[-1]
        for layer in layers:
            output, residual = self.attended(layer, normed, residual)
            normed, residual = self.after_attention(layer, output, residual)
            normed, residual = self.after_mlp(layer, self.mlp(layer, normed), residual)
            on_layer(layer + 1)
        if layers.stop == spec.num_layers:
            logits = self.logits(normed)
            outputs = [
                named_output(logits, io.LOGITS, ir.DataType.FLOAT, ["R", spec.vocab_size]),
                named_output(self._entropy(logits), io.ENTROPY, ir.DataType.FLOAT, ["R"]),
                *self._more_outputs(logits, normed),
            ]
        else:
            names = self._crossing_names(layers.stop)
            outputs = [
                named_output(value, name, self.dtype, ["N", spec.hidden_size])
                for value, name in zip((residual, normed), names, strict=False)
            ]
        is_whole = len(layers) == spec.num_layers
        inputs += [value for value in step.all() if is_whole or value.uses()]
        return g.model(
            [*inputs, *self.attention.cache_inputs],
            [*outputs, *self.attention.cache_outputs],
            f"{spec.architecture}_{form}",
        )

    def _crossing_names(self, layer: int) -> list[str]:
        """What a layer needs of those before it: the residual stream, and its norm if it has one
        there."""
        is_normed = self.spec.layer.attention_norm is not None
        names = (io.LAYER_RESIDUAL, io.LAYER_NORMED) if is_normed else (io.LAYER_RESIDUAL,)
        return [name.format(layer) for name in names]

    @property
    def dtype(self) -> ir.DataType:
        """Of activations."""
        return ir.DataType.from_numpy(np.dtype(self.g.activations))

    def looked_up(self, ids: ir.Value) -> ir.Value:
        """int64 [N] -> [N, hidden]: rows of the embedding."""
        with self.g.scope("embed"):
            return self.parts.head_format.embed(self.g, ids, self.parts.weight(self.spec.embed))

    def embedded(self, x: ir.Value) -> tuple[ir.Value, ir.Value]:
        """What the first layer starts from, normed and not."""
        with self.g.scope("embed"):
            residual = self._with_positions(
                self._scaled(x, "embedding_scale", self.spec.embedding_scale)
            )
        with self.g.scope("layers.0"):
            return self.norms.plain(residual, self.spec.layer.attention_norm, 0), residual

    def attended(
        self, layer: int, normed: ir.Value, residual: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        """What attention gives, before its own norm, and the residual stream."""
        spec, g, names = self.spec, self.g, self.spec.layer
        with g.scope(f"layers.{layer}"), g.scope("attention"):
            attended = self._attention(layer, normed)
            if layer == spec.num_layers - 1:
                # Only rows whose logits are wanted go on from here.
                attended = g.op("Gather", attended, self.step.logits_index)
                residual = g.op("Gather", residual, self.step.logits_index)
                g.next_row_set()
            bias = spec.output_bias and self.parts.adds_biases
            output = self._linear(attended, names.output.format(layer), bias=bias)
        return output, residual

    def after_attention(
        self, layer: int, output: ir.Value, residual: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        """What the MLP starts from, normed and not."""
        names = self.spec.layer
        with self.g.scope(f"layers.{layer}"):
            with self.g.scope("attention"):
                output = self._added(self.norms.plain(output, names.attention_post_norm, layer))
            with self.g.scope("mlp"):
                return self.norms.skip(output, residual, names.mlp_norm, layer)

    def mlp(self, layer: int, normed: ir.Value) -> ir.Value:
        """What it gives, before its own norm."""
        with self.g.scope(f"layers.{layer}"), self.g.scope("mlp"):
            return self._mlp(layer, normed)

    def after_mlp(
        self, layer: int, output: ir.Value, residual: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        """What the next layer or the head starts from, normed and not."""
        spec, names = self.spec, self.spec.layer
        with self.g.scope(f"layers.{layer}"):
            with self.g.scope("mlp"):
                output = self._added(self.norms.plain(output, names.mlp_post_norm, layer))
            last = layer == spec.num_layers - 1
            following = spec.final_norm if last else names.attention_norm
            return self.norms.skip(output, residual, following, layer + 1)

    def logits(self, hidden: ir.Value) -> ir.Value:
        """[R, hidden] -> float32 [R, vocab]."""
        spec, g, formats = self.spec, self.g, self.parts.head_format
        weight = self.parts.weight(spec.head)
        with g.scope("head"):
            if (matrix := self.parts.head_matrix) is not None:
                hidden = g.op("MatMul", hidden, g.weight(io.HEAD_MATRIX, matrix))
                g.store.describe(io.HEAD_MATRIX, (spec.hidden_size, spec.hidden_size), "fp32")
            hidden = self._scaled(hidden, "logits_scale", spec.logits_scale)
            emit = formats.tied_head if spec.tied_embeddings else formats.linear
            logits = emit(g, hidden, weight)
            if g.activations is not np.float32:
                logits = g.cast(logits, np.float32)
            return soft_capped(g, logits, spec.logits_softcap)

    def _entropy(self, logits: ir.Value) -> ir.Value:
        """float32 [R, vocab] -> nats [R].

        H = -sum p log p; log p comes from LogSoftmax, since sum p x loses 4 digits to
        cancellation.
        """
        g = self.g
        with g.scope("head"):
            log_p = g.op("LogSoftmax", logits, attributes={"axis": -1})
            last = g.constant("axis_last", np.array([-1], np.int64))
            weighted = g.op("Mul", g.op("Exp", log_p), log_p)
            total = g.op("ReduceSum", weighted, last, attributes={"keepdims": 0})
            return g.op("Neg", total)

    def _more_outputs(self, logits: ir.Value, normed: ir.Value) -> list[ir.Value]:
        spec, g, step = self.spec, self.g, self.step
        with g.scope("sampling"):
            if isinstance(step, PagedInputs):
                # Not ArgMax, which would be the only node that needs cuDNN.
                one = g.constant("one_token", _ints(1))
                _, likeliest = g.ops("TopK", logits, one, outputs=2, attributes={"axis": -1})
                likeliest = g.op("Reshape", likeliest, g.constant("flat", _ints(-1)))
                return [named_output(likeliest, io.ARGMAX, ir.DataType.INT64, ["R"])]
            sampling = emit_probabilities(g, logits, step.inverse_temperature, spec.vocab_size)
        names = (io.PROBABILITIES, io.BLOCK_MAXIMA, io.BLOCK_SUMS)
        float32 = ir.DataType.FLOAT
        return [
            *(
                named_output(value, name, float32, ["P", "W"])
                for value, name in zip(sampling, names, strict=True)
            ),
            named_output(normed, io.HIDDEN, float32, ["R", spec.hidden_size]),
        ]

    def _with_positions(self, x: ir.Value) -> ir.Value:
        spec, g = self.spec, self.g
        if (name := spec.positions) is None:
            return x
        full = f"{name}.weight"
        g.store.describe(full, (spec.context_tokens, spec.hidden_size), "fp32")
        learned = g.weight(full, lambda: self.parts.weight(name).load().astype(g.activations))
        return g.op("Add", x, g.op("Gather", learned, self._positions()))

    def _positions(self) -> ir.Value:
        """int64 [N]: of each packed token."""
        g, step = self.g, self.step
        if isinstance(step, PagedInputs):
            assert step.positions is not None
            return step.positions
        flat = g.op("Reshape", emit_positions(g, step), g.constant("flat", _ints(-1)))
        return g.op("Gather", flat, step.scatter)

    def _attention(self, layer: int, normed: ir.Value) -> ir.Value:
        """[N, hidden] -> [N, heads * head_dim]."""
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
            down_bias=bias(down) if self.parts.adds_biases else None,
            activation=self.spec.activation,
        )
        return self.parts.layer_format.gated_mlp(self.g, normed, weights)

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
        return self.g.op("Mul", x, self.g.constant(name, np.array(factor, self.g.activations)))

    def _added(self, x: ir.Value) -> ir.Value:
        """What the residual stream has added of x."""
        return self._scaled(x, "residual_scale", self.spec.residual_scale)

    def _vector(self, name: str) -> ir.Value:
        """Kept in float32."""
        stored = self.g.weight(name, lambda: self.parts.vector(name))
        assert stored.shape is not None
        self.g.store.describe(name, stored.shape.numpy(), "fp32")
        return stored


def soft_capped(g: GraphBuilder, logits: ir.Value, cap: float | None) -> ir.Value:
    """cap * tanh(logits / cap), or the logits themselves."""
    if cap is None:
        return logits
    factor, inverse = (
        g.constant(name, np.array(value, np.float32))
        for name, value in (("logits_softcap", cap), ("logits_softcap_inverse", 1 / cap))
    )
    return g.op("Mul", g.op("Tanh", g.op("Mul", logits, inverse)), factor)


def _ints(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)
