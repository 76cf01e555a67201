"""A format for each weight."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from headrace.exporters.graph.builder import GraphBuilder
from headrace.exporters.graph.linear import (
    LinearFormat,
    MlpWeights,
    RowInt8Format,
    Weight,
    stacked_mlp,
)


class MixedFormat:
    """Stores each weight in the format that `choose` names for it.

    A gated MLP whose weights are all row INT8 is one RowQuantGatedMlp, unless its own inputs are to
    be mixed; else its products stand alone, with the inputs of a row INT8 `down` mixed by nodes of
    their own.
    """

    name = "mixed"

    def __init__(self, choose: Callable[[str], LinearFormat]) -> None:
        self._choose = choose
        self._mixed: set[str] = set()

    def linear(self, g: GraphBuilder, x: ir.Value, weight: Weight) -> ir.Value:
        fmt = self._choose(weight.name)
        if weight.name in self._mixed and isinstance(fmt, RowInt8Format):
            return fmt.mixed_linear(g, x, weight)
        return fmt.linear(g, x, weight)

    def embed(self, g: GraphBuilder, ids: ir.Value, weight: Weight) -> ir.Value:
        return self._choose(weight.name).embed(g, ids, weight)

    def tied_head(self, g: GraphBuilder, x: ir.Value, weight: Weight) -> ir.Value:
        return self._choose(weight.name).tied_head(g, x, weight)

    def gated_mlp(self, g: GraphBuilder, x: ir.Value, weights: MlpWeights) -> ir.Value:
        both = [self._choose(w.name) for w in (weights.gate_up, weights.down)]
        plain = weights.gate_up.name not in self._mixed
        if plain and all(isinstance(fmt, RowInt8Format) for fmt in both):
            return both[0].gated_mlp(g, x, weights)
        self.mix_inputs_of(weights.down.name)
        return stacked_mlp(self, g, x, weights)

    def mix_inputs_of(self, weight_name: str) -> None:
        """From here on, if this weight is row INT8 its inputs are mixed in runs."""
        self._mixed.add(weight_name)
