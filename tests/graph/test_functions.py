"""Model-local functions against their formulas in int64 and float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from headrace.exporters.graph.builder import GraphBuilder, graph_input, named_output
from headrace.exporters.graph.functions import MIX_WIDTH, row_quant_gated_mlp, row_quant_matmul
from headrace.exporters.graph.mixing import mix_runs, mixing_matrix
from headrace.exporters.graph.weights import WeightStore

K, M = 48, 2 * MIX_WIDTH
RNG = np.random.default_rng(0)


def rows_of_all_kinds() -> np.ndarray:
    """Ordinary, huge, zero, with an outlier, tiny."""
    x = RNG.standard_normal((5, K)).astype(np.float32)
    x[1] *= 1e4
    x[2] = 0
    x[3, 7] = 300
    x[4] *= 1e-6
    return x


def weight(inputs: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    codes = RNG.integers(-127, 128, (inputs, outputs)).astype(np.int8)
    return codes, RNG.uniform(1e-3, 1e-2, outputs).astype(np.float32)


def session(folder: Path, function: ir.Function, arrays: list[np.ndarray]) -> Any:
    """The function with its weights as initializers, on stock operators."""
    with WeightStore(folder, "weights.bin") as store:
        g = GraphBuilder(store)
        x = graph_input("x", ir.DataType.FLOAT, ["N", K])
        middle = graph_input("middle", ir.DataType.UINT8, ["N", 1])
        stored = [g.constant(f"w{i}", array) for i, array in enumerate(arrays)]
        y = named_output(g.call(function, x, *stored, middle), "y", ir.DataType.FLOAT, ["N", "M"])
        ir.save(g.model([x, middle], [y], "function"), folder / "function.onnx")
    options = ort.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")
    file = str(folder / "function.onnx")
    return ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def run(session: Any, x: np.ndarray) -> np.ndarray:
    middle = np.full((len(x), 1), 128, np.uint8)
    return np.asarray(session.run(None, {"x": x, "middle": middle})[0])


def row_quantized(x: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The slow twin: codes by float32 rounding, as the operator does, sums in int64."""
    step = np.abs(x).max(axis=1, keepdims=True) * np.float32(1 / 127)
    safe = np.where(step == 0, np.float32(1), step)
    q = np.clip(np.rint(x / safe), -128, 127).astype(np.int64)
    return np.asarray((q @ codes.astype(np.int64)) * scales.astype(np.float64) * step)


def assert_rows_close(actual: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    error = np.abs(actual - expected).max(axis=1)
    assert (error <= tolerance * np.abs(expected).max(axis=1)).all(), error


def check_independent_rows(of: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> None:
    together = of(x)
    for i in range(len(x)):
        np.testing.assert_array_equal(of(x[i : i + 1])[0], together[i])


def test_row_quant_matmul(tmp_path: Path) -> None:
    x, (codes, scales) = rows_of_all_kinds(), weight(K, M)
    made = session(tmp_path, row_quant_matmul(), [codes, scales])
    assert_rows_close(run(made, x), row_quantized(x, codes, scales), 1e-6)
    check_independent_rows(lambda rows: run(made, rows), x)


def test_row_quant_gated_mlp(tmp_path: Path) -> None:
    x = rows_of_all_kinds()
    gate, up, down = weight(K, M), weight(K, M), weight(M, K)
    mix = mixing_matrix()
    arrays = [*gate, *up, *down, mix, np.array([-1, M], np.int64)]
    made = session(tmp_path, row_quant_gated_mlp(), arrays)
    gated = row_quantized(x, *gate)
    with np.errstate(over="ignore"):
        silu = gated / (1 + np.exp(-gated))
    hidden = (silu * row_quantized(x, *up)).reshape(-1, MIX_WIDTH) @ mix
    hidden = hidden.reshape(len(x), M).astype(np.float32)
    # A code that falls on the other side of a rounding edge moves the sum by one weight.
    assert_rows_close(run(made, x), row_quantized(hidden, *down), 0.02)
    check_independent_rows(lambda rows: run(made, rows), x)


def test_calls_of_a_function_are_part_of_the_model(tmp_path: Path) -> None:
    """A kernel registered under this domain and name would replace the body."""
    session(tmp_path, row_quant_matmul(), list(weight(K, M)))
    model = ir.load(tmp_path / "function.onnx")
    assert [node.domain for node in model.graph if node.op_type == "RowQuantMatMul"] == ["headrace"]
    assert ("headrace", "RowQuantMatMul", "") in model.functions


def test_mixing_inputs_and_weights_cancels() -> None:
    weight_, x = RNG.standard_normal((7, M)).astype(np.float32), RNG.standard_normal(M)
    mixed = (x.reshape(-1, MIX_WIDTH) @ mixing_matrix()).reshape(-1)
    np.testing.assert_allclose(mix_runs(weight_) @ mixed, weight_ @ x, atol=1e-5)
