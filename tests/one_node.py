"""Graphs of one node, run by ONNX Runtime and by `contrib_ops`, and how far apart they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from contrib_ops import evaluator
from numpy.typing import NDArray

from headrace.exporters.graph.builder import MICROSOFT, OPSET

Array = NDArray[Any]
Feeds = Mapping[str, Array | None]


def one_node(
    op_type: str, feeds: Feeds, outputs: int = 1, domain: str = MICROSOFT, **attributes: Any
) -> onnx.ModelProto:
    """A graph of one node; inputs that are None are left out."""
    values = {
        name: ir.Value(
            name=name,
            type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
            shape=ir.Shape(array.shape),
        )
        for name, array in feeds.items()
        if array is not None
    }
    tape = ir.tape.Tape()
    results = tape.op_multi_out(
        op_type,
        [values.get(name) for name in feeds],
        attributes,
        num_outputs=outputs,
        domain=domain,
    )
    for i, result in enumerate(results):
        result.name = f"y{i}"
    opsets = {"": OPSET, MICROSOFT: 1}
    graph = ir.Graph(
        list(values.values()), list(results), nodes=tape.nodes, opset_imports=opsets, name="one"
    )
    return ir.to_proto(ir.Model(graph, ir_version=11))


def reference(op_type: str, feeds: Feeds, outputs: int = 1, **attributes: Any) -> list[Array]:
    given = {name: array for name, array in feeds.items() if array is not None}
    model = one_node(op_type, feeds, outputs, **attributes)
    return [np.asarray(y) for y in evaluator(model).run(None, given)]


def cpu_kernel(
    op_type: str, feeds: Feeds, outputs: int = 1, dtype: Any = np.float32, **attributes: Any
) -> list[Array]:
    """Outputs of that type, as ONNX Runtime makes them."""
    model = one_node(op_type, feeds, outputs, **attributes)
    for output in model.graph.output:
        output.type.tensor_type.elem_type = int(ir.DataType.from_numpy(np.dtype(dtype)))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    given = {name: array for name, array in feeds.items() if array is not None}
    return [np.asarray(y) for y in session.run(None, given)]


def normal(*shape: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def half_steps(actual: Array, expected: Array) -> float:
    """Largest difference in units of FP16's rounding of the largest value, 2^-11 of it."""
    difference = np.abs(actual.astype(np.float64) - expected)
    return float(difference.max() / np.abs(expected).max() * 2**11)
