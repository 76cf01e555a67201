"""Norms of a decoder's layers. Gains and statistics are float32, whatever activations are."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from headrace.exporters.archs.spec import DecoderSpec
from headrace.exporters.graph.builder import MICROSOFT, GraphBuilder


class Norms:
    """Emits norms of the kind that `spec` names.

    Args:
        vector: finds a gain or a bias by its checkpoint name.
    """

    def __init__(
        self, spec: DecoderSpec, g: GraphBuilder, vector: Callable[[str], ir.Value]
    ) -> None:
        self._spec, self._g, self._vector = spec, g, vector

    def plain(self, x: ir.Value, name: str | None, layer: int) -> ir.Value:
        """The norm of x, or x where there is none."""
        if name is None:
            return x
        weights = self._weights(name.format(layer))
        attributes = {"epsilon": self._spec.norm_eps, "axis": -1, "stash_type": 1}
        if self._g.activations is np.float16:
            return self._of_halves(x, weights, attributes)
        return self._g.op(self._kind, x, *weights, attributes=attributes)

    def skip(
        self, x: ir.Value, residual: ir.Value, name: str | None, layer: int
    ) -> tuple[ir.Value, ir.Value]:
        """The norm of x + residual, and x + residual."""
        if name is None or self._g.activations is np.float16:
            total = self._g.op("Add", x, residual)
            return self.plain(total, name, layer), total
        kind = "Skip" if self._spec.norm == "layer" else "SkipSimplified"
        normed, mean, deviation, total = self._g.ops(
            f"{kind}LayerNormalization",
            x,
            residual,
            *self._weights(name.format(layer)),
            outputs=4,
            domain=MICROSOFT,
            attributes={"epsilon": self._spec.norm_eps},
        )
        mean.name = deviation.name = ""  # an output without a name is not computed
        return normed, total

    def _of_halves(
        self, x: ir.Value, weights: list[ir.Value], attributes: Mapping[str, int | float]
    ) -> ir.Value:
        """RMSNormalization takes halves with a float32 gain, which its output has the type of."""
        if self._spec.norm == "layer":
            x = self._g.cast(x, np.float32)
        normed = self._g.op(self._kind, x, *weights, attributes=dict(attributes))
        return self._g.cast(normed, np.float16)

    @property
    def _kind(self) -> str:
        return "LayerNormalization" if self._spec.norm == "layer" else "RMSNormalization"

    def _weights(self, name: str) -> list[ir.Value]:
        kinds = ("weight", "bias") if self._spec.norm == "layer" else ("weight",)
        return [self._vector(f"{name}.{kind}") for kind in kinds]
