"""Activation functions of MLPs, as operators that have CPU kernels."""

from __future__ import annotations

import onnx_ir as ir

from headrace.exporters.graph.builder import MICROSOFT, GraphBuilder


def emit_activation(g: GraphBuilder, x: ir.Value, kind: str) -> ir.Value:
    """`kind` as in `DecoderSpec.activation`; float32, the shape of x."""
    if kind == "silu":
        # QuickGelu with alpha 1 is SiLU, and has a CPU kernel where SwiGLU has none.
        return g.op("QuickGelu", x, domain=MICROSOFT, attributes={"alpha": 1.0})
    if kind in ("gelu", "gelu_tanh"):
        approximate = "tanh" if kind == "gelu_tanh" else "none"
        return g.op("Gelu", x, attributes={"approximate": approximate})
    assert kind in ("relu", "relu2")
    positive = g.op("Relu", x)
    return g.op("Mul", positive, positive) if kind == "relu2" else positive
