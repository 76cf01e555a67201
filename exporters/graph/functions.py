"""Model-local functions: a body of stock operators that a native kernel may replace.

ONNX Runtime inlines a function, and prefers a custom operator of the same domain and name if one is
registered, so kernels can be added without exporting again.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from headrace.exporters.graph.builder import HEADRACE, MICROSOFT, OPSET


def row_quant_matmul() -> ir.Function:
    """`y = RowQuantMatMul(x, codes, scales)`: every row of x is quantized on its own.

    x float32 [N, K]; codes int8 [K, M]; scales float32 [M]; y float32 [N, M].

        m[n] = max(max_k |x[n, k]|, tiny)
        q[n, k] = saturate_u8(round(127 * x[n, k] / m[n]) + 128)
        y[n, j] = m[n] * scales[j] * (sum_k (q[n, k] - 128) * codes[k, j]) / 127

    The integer sum is exact, so a row's result does not depend on the other rows. A per-column
    scale inside MatMulIntegerToFloat runs on one thread, hence the scalar one and the Mul.
    """
    x, codes, scales = (ir.Value(name=name) for name in ("x", "codes", "scales"))
    tape = ir.tape.Tape()

    def constant(name: str, array: np.ndarray) -> ir.Value:
        return tape.op("Constant", [], {"value": ir.tensor(array, name=name)})

    one = constant("one", np.array(1, np.float32))
    step = constant("step", np.array(1 / 127, np.float32))
    middle = constant("middle", np.array(128, np.uint8))
    tiny = constant("tiny", np.array(1e-30, np.float32))
    last = constant("last", np.array([-1], np.int64))
    peak = tape.op("ReduceMax", [tape.op("Abs", [x]), last], {"keepdims": 1})
    peak = tape.op("Max", [peak, tiny])  # a row of zeros stays zero
    quantized = tape.op("QuantizeLinear", [tape.op("Div", [x, peak]), step, middle])
    product = tape.op(
        "MatMulIntegerToFloat", [quantized, codes, one, step, middle], domain=MICROSOFT
    )
    y = tape.op("Mul", [tape.op("Mul", [product, scales]), peak])
    y.name = "y"
    graph = ir.Graph(
        [x, codes, scales], [y], nodes=tape.nodes, opset_imports={"": OPSET, MICROSOFT: 1}
    )
    return ir.Function(HEADRACE, "RowQuantMatMul", graph=graph, attributes=[])
