"""A rank's part of a decoder, cut into graphs where ranks sum what they have.

    ids -> [look up] -> sum -> [norm, attention] -> sum -> [norm, MLP] -> sum -> ... -> [norm, head]

Every piece but the last gives `partial`, which is summed over ranks and enters the next one as
`summed`. The residual stream, the same on all ranks, leaves a piece as `residual` and enters the
next as `carried`. Embedding and head are split by tokens: a rank looks up zeros for others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx_ir as ir

from headrace.exporters.graph.builder import graph_input, named_output
from headrace.exporters.graph.decoder import PAGED, DecoderParts, decoder_of
from headrace.exporters.graph.weights import WeightStore
from headrace.runtime import manifest as io

_INT64, _FLOAT32 = ir.DataType.INT64, ir.DataType.FLOAT


def build_pieces(
    parts: DecoderParts,
    store: WeightStore,
    form: str,
    first_token: int,
    on_layer: Callable[[int], None] = lambda layers_done: None,
) -> Iterator[ir.Model]:
    """The pieces of a rank in their order.

    Args:
        parts: the rank's; `vocab_size` tokens from `first_token` on.
    """
    spec = parts.spec
    piece = _Piece(parts, store, form, "N")
    yield piece.model("embed", piece.looked_up(first_token))
    for layer in range(spec.num_layers):
        piece = _Piece(parts, store, form, "N")
        if layer == 0:
            normed, residual = piece.decoder.embedded(piece.summed)
        else:
            normed, residual = piece.decoder.after_mlp(layer - 1, piece.summed, piece.carried)
        partial, residual = piece.decoder.attended(layer, normed, residual)
        rows = "R" if layer == spec.num_layers - 1 else "N"
        yield piece.model(f"attention_{layer}", partial, residual, rows=rows)
        piece = _Piece(parts, store, form, rows)
        normed, residual = piece.decoder.after_attention(layer, piece.summed, piece.carried)
        yield piece.model(f"mlp_{layer}", piece.decoder.mlp(layer, normed), residual)
        on_layer(layer + 1)
    piece = _Piece(parts, store, form, "R")
    normed, _ = piece.decoder.after_mlp(spec.num_layers - 1, piece.summed, piece.carried)
    yield piece.head(piece.decoder.logits(normed), first_token)


class _Piece:
    """A graph under construction, with what the piece before gives. `rows`: how many of them."""

    def __init__(self, parts: DecoderParts, store: WeightStore, form: str, rows: str) -> None:
        self.decoder = decoder_of(parts, store, form)
        self._g, self._step, self._dtype = self.decoder.g, self.decoder.step, self.decoder.dtype
        self._spec, self._paged, self._rows = parts.spec, form == PAGED, rows
        self._name = f"{parts.spec.architecture}_{form}"
        shape: list[int | str] = [rows, parts.spec.hidden_size]
        self._ids = graph_input(io.INPUT_IDS, _INT64, ["N"])
        self.summed, self.carried = (
            graph_input(name, self._dtype, shape) for name in (io.SUMMED, io.CARRIED)
        )

    def looked_up(self, first_token: int) -> ir.Value:
        """Rows of the embedding for the rank's own tokens, zeros for others."""
        g, ids = self._g, self._ids
        with g.scope("embed"):
            zero = g.constant("no_token", np.array(0, np.int64))
            local = g.op("Sub", ids, g.constant("first_token", np.array(first_token, np.int64)))
            size = g.constant("num_tokens", np.array(self._spec.vocab_size, np.int64))
            own = g.op("And", g.op("GreaterOrEqual", local, zero), g.op("Less", local, size))
            x = self.decoder.looked_up(g.op("Where", own, local, zero))
            column = g.op("Unsqueeze", own, g.constant("axis_own", np.array([1], np.int64)))
            return g.op("Mul", x, g.cast(column, g.activations))

    def model(
        self,
        name: str,
        partial: ir.Value,
        residual: ir.Value | None = None,
        rows: str | None = None,
    ) -> ir.Model:
        shape: list[int | str] = [rows or self._rows, self._spec.hidden_size]
        outputs = [named_output(partial, io.PARTIAL, self._dtype, shape)]
        if residual is not None:
            if residual is self.summed:  # an input cannot be an output
                residual = self._g.op("Identity", residual)
            outputs.append(named_output(residual, io.RESIDUAL, self._dtype, shape))
        return self._model(name, outputs)

    def head(self, logits: ir.Value, first_token: int) -> ir.Model:
        g, last = self._g, {"axis": -1}
        with g.scope("head"):
            axis = g.constant("axis_last", np.array([-1], np.int64))
            top = g.op("ReduceMax", logits, axis)
            below = g.op("Sub", logits, top)
            powers = g.op("Exp", below)
            sums = [
                top,
                g.op("ReduceSum", powers, axis),
                g.op("ReduceSum", g.op("Mul", powers, below), axis),
            ]
            together = g.op("Concat", *sums, attributes=last)
            outputs = [
                named_output(logits, io.LOGITS, _FLOAT32, ["R", self._spec.vocab_size]),
                named_output(together, io.HEAD_SUMS, _FLOAT32, ["R", 3]),
            ]
            if self._paged:
                one = g.constant("one_token", np.array([1], np.int64))
                _, likeliest = g.ops("TopK", logits, one, outputs=2, attributes=last)
                flat = g.op("Reshape", likeliest, g.constant("flat", np.array([-1], np.int64)))
                first = g.constant("first_token", np.array(first_token, np.int64))
                likeliest = g.op("Add", flat, first)
                outputs.append(named_output(likeliest, io.ARGMAX, _INT64, ["R"]))
        return self._model("head", outputs)

    def _model(self, name: str, outputs: list[ir.Value]) -> ir.Model:
        inputs = [self._ids, self.summed, self.carried, *self._step.all()]
        if "attention" in vars(self.decoder):
            inputs += self.decoder.attention.cache_inputs
            outputs = [*outputs, *self.decoder.attention.cache_outputs]
        used = [value for value in inputs if value.uses()]
        return self._g.model(used, outputs, f"{self._name}_{name}")
