"""Model-local functions: a body of stock operators that a native kernel may replace.

ONNX Runtime inlines a function, and prefers a custom operator of the same domain and name if one is
registered, so kernels can be added without exporting again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from headrace.exporters.graph.builder import HEADRACE, MICROSOFT, OPSET

# QuantizeLinear takes the number of blocks from the shape of its scales; a block may be wider than
# the row.
_ANY_WIDTH = 1 << 20

# Values that RowQuantGatedMlp mixes with each other. On SmolLM2-135M, mean KL over WikiText without
# mixing 0.0183 nats, with runs of 32, 64, 128: 0.0087, 0.0081, 0.0079; a step costs 5% more.
MIX_WIDTH = 64


def row_quant_matmul() -> ir.Function:
    """`y = RowQuantMatMul(x, codes, scales, middle)`: every row of x is quantized on its own.

    x float32 [N, K]; codes int8 [K, M]; scales float32 [M]; middle uint8 [N, 1], all 128, the zero
    points of the rows; y float32 [N, M].

        step[n] = max_k |x[n, k]| / 127
        q[n, k] = saturate_u8(round(x[n, k] / step[n]) + 128)
        y[n, j] = step[n] * scales[j] * sum_k (q[n, k] - 128) * codes[k, j]

    The integer sum is exact, so a row's result does not depend on the other rows. A row of zeros
    divides zero by zero; whatever code that becomes, times step = 0 it is 0.

    A per-column scale inside MatMulIntegerToFloat runs on one thread, hence the scalar one and the
    Mul. `middle` is an input because one tensor serves all layers: making it costs two nodes.
    """
    x, codes, scales, middle = (ir.Value(name=n) for n in ("x", "codes", "scales", "middle"))
    body = _Body()
    q, step = body.quantize(x, middle)
    y = body.op("Mul", body.op("Mul", body.integer_matmul(q, codes), scales), step)
    return body.function("RowQuantMatMul", [x, codes, scales, middle], y)


def row_quant_gated_mlp() -> ir.Function:
    """`y = RowQuantGatedMlp(x, gate, gate_scales, up, up_scales, down, down_scales, mix, shape,
    middle)`: down(silu(gate(x)) * up(x)) with three RowQuantMatMuls.

    x is quantized once. The row scale of `up` is left out until the end: it scales a whole row of
    what `down` quantizes by that row's own maximum, so it only has to be multiplied back.

    The product of gate and up has outliers that would take the precision of their whole row. Each
    run of b values is therefore multiplied by `mix`, an orthogonal float32 [b, b], which spreads
    them; `down` is stored with its inputs mixed likewise (QuaRot, Ashkboos et al. 2024, with a
    whole-row transform). `shape` int64 [2] is [-1, intermediate].
    """
    names = ("x", "gate", "gate_scales", "up", "up_scales", "down", "down_scales", "mix", "shape")
    inputs = [ir.Value(name=name) for name in (*names, "middle")]
    x, gate, gate_scales, up, up_scales, down, down_scales, mix, shape, middle = inputs
    body = _Body()
    q, step = body.quantize(x, middle)
    gated = body.op("Mul", body.op("Mul", body.integer_matmul(q, gate), gate_scales), step)
    # QuickGelu with alpha 1 is SiLU, and has a CPU kernel where SwiGLU has none.
    silu = body.op("QuickGelu", gated, domain=MICROSOFT, alpha=1.0)
    hidden = body.op("Mul", silu, body.op("Mul", body.integer_matmul(q, up), up_scales))
    runs = body.op("Reshape", hidden, body.constant("runs", np.array([-1, MIX_WIDTH], np.int64)))
    mixed = body.op("Reshape", body.op("MatMul", runs, mix), shape)
    q, mixed_step = body.quantize(mixed, middle)
    y = body.op("Mul", body.integer_matmul(q, down), down_scales)
    y = body.op("Mul", y, body.op("Mul", mixed_step, step))
    return body.function("RowQuantGatedMlp", inputs, y)


class _Body:
    """Nodes of a function; functions have no initializers, so constants are nodes."""

    def __init__(self) -> None:
        self._tape = ir.tape.Tape()
        self._constants: dict[str, ir.Value] = {}

    def op(self, kind: str, *inputs: ir.Value, domain: str = "", **attributes: Any) -> ir.Value:
        return self._tape.op(kind, list(inputs), attributes or None, domain=domain)

    def constant(self, name: str, array: NDArray[np.generic]) -> ir.Value:
        if name not in self._constants:
            value = ir.tensor(array, name=name)
            self._constants[name] = self._tape.op("Constant", [], {"value": value})
        return self._constants[name]

    def quantize(self, x: ir.Value, middle: ir.Value) -> tuple[ir.Value, ir.Value]:
        """uint8 codes [N, K] and step [N, 1]: one block as wide as the row."""
        last = self.constant("last", np.array([-1], np.int64))
        peak = self.op("ReduceMax", self.op("Abs", x), last, keepdims=1)
        step = self.op("Mul", peak, self.constant("to_step", np.array(1 / 127, np.float32)))
        return self.op("QuantizeLinear", x, step, middle, axis=1, block_size=_ANY_WIDTH), step

    def integer_matmul(self, q: ir.Value, codes: ir.Value) -> ir.Value:
        """float32 [N, M]: sum_k (q - 128) * codes."""
        one = self.constant("one", np.array(1, np.float32))
        middle = self.constant("middle_code", np.array(128, np.uint8))
        return self.op("MatMulIntegerToFloat", q, codes, one, one, middle, domain=MICROSOFT)

    def function(self, name: str, inputs: list[ir.Value], output: ir.Value) -> ir.Function:
        output.name = "y"
        opsets = {"": OPSET, MICROSOFT: 1}
        graph = ir.Graph(inputs, [output], nodes=self._tape.nodes, opset_imports=opsets)
        return ir.Function(HEADRACE, name, graph=graph, attributes=[])
