"""A thin layer over onnx_ir: nodes with readable names, initializers from the weight store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from headrace.exporters.graph.weights import WeightStore

MICROSOFT = "com.microsoft"
HEADRACE = "headrace"
OPSET = 23  # first with RMSNormalization
IR_VERSION = 11

Attributes = Mapping[str, int | float | str | Sequence[int] | ir.Graph]


class GraphBuilder:
    """Collects the nodes, initializers and functions of one graph.

    Node names are paths such as `layers.3/attention/qkv`, so that a profile can be read.
    `activations`: what layers work in, float32 or float16.
    """

    def __init__(
        self, store: WeightStore, activations: type[np.float32 | np.float16] = np.float32
    ) -> None:
        self.store = store
        self.activations = activations
        self._tape = ir.tape.Tape()
        self._initializers: dict[str, ir.Value] = {}
        self._functions: dict[str, ir.Function] = {}
        self._scope: list[str] = []
        self._row_set = 0
        self._made: dict[tuple[int, str], ir.Value] = {}
        self._used: dict[str, int] = {}

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        self._scope.append(name)
        try:
            yield
        finally:
            self._scope.pop()

    def op(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        domain: str = "",
        attributes: Attributes | None = None,
    ) -> ir.Value:
        return self.ops(op_type, *inputs, outputs=1, domain=domain, attributes=attributes)[0]

    def ops(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        outputs: int,
        domain: str = "",
        attributes: Attributes | None = None,
    ) -> Sequence[ir.Value]:
        name = self._unique("/".join([*self._scope, op_type]))
        values = self._tape.op_multi_out(
            op_type, inputs, dict(attributes or {}), num_outputs=outputs, domain=domain, name=name
        )
        for i, value in enumerate(values):
            value.name = f"{name}:{i}"
        return values

    def weight(self, name: str, make: Callable[[], NDArray[np.generic]]) -> ir.Value:
        """An initializer in the shared weight file; `make` runs only if it is not there yet."""
        if name not in self._initializers:
            self._initializers[name] = self._tape.initializer(self.store.get(name, make), name)
        return self._initializers[name]

    def constant(self, name: str, array: NDArray[np.generic]) -> ir.Value:
        """A small initializer inside the graph file."""
        if name not in self._initializers:
            self._initializers[name] = self._tape.initializer(ir.tensor(array, name=name), name)
        return self._initializers[name]

    def cast(self, x: ir.Value, dtype: type[np.generic]) -> ir.Value:
        to = ir.DataType.from_numpy(np.dtype(dtype))
        return self.op("Cast", x, attributes={"to": to.value})

    def call(self, function: ir.Function, *inputs: ir.Value) -> ir.Value:
        """A call of a model-local function, which becomes part of the model."""
        self._functions.setdefault(function.name, function)
        return self.op(function.name, *inputs, domain=function.domain)

    def branch(
        self,
        condition: ir.Value,
        then: Callable[[ir.tape.Tape], Sequence[ir.Value]],
        otherwise: Callable[[ir.tape.Tape], Sequence[ir.Value]],
    ) -> Sequence[ir.Value]:
        """An If; its branches give equally many values and may use values from outside."""
        bodies = {}
        for name, make in (("then_branch", then), ("else_branch", otherwise)):
            tape = ir.tape.Tape()
            outputs = make(tape)
            body = self._unique("/".join([*self._scope, name]))
            for i, output in enumerate(outputs):
                output.name = f"{body}:{i}"
            bodies[name] = ir.Graph([], outputs, nodes=tape.nodes, name=body)
        return self.ops("If", condition, outputs=len(outputs), attributes=bodies)

    def next_row_set(self) -> None:
        """From here on values have other rows than before."""
        self._row_set += 1

    def once_per_row_set(self, key: str, make: Callable[[], ir.Value]) -> ir.Value:
        """A value that depends only on how many rows there are, made where first asked for."""
        place = (self._row_set, key)
        if place not in self._made:
            self._made[place] = make()
        return self._made[place]

    def model(
        self,
        inputs: Sequence[ir.Value],
        outputs: Sequence[ir.Value],
        name: str,
        *,
        opset: int = OPSET,
    ) -> ir.Model:
        opsets = {"": opset, MICROSOFT: 1}
        if self._functions:
            opsets[HEADRACE] = 1
        graph = ir.Graph(
            inputs,
            outputs,
            nodes=self._tape.nodes,
            initializers=[value for value in self._initializers.values() if value.uses()],
            opset_imports=opsets,
            name=name,
        )
        return ir.Model(
            graph,
            ir_version=IR_VERSION,
            producer_name="headrace",
            functions=list(self._functions.values()),
        )

    def _unique(self, name: str) -> str:
        count = self._used.get(name, 0)
        self._used[name] = count + 1
        return f"{name}.{count}" if count else name


def graph_input(name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def named_output(
    value: ir.Value, name: str, dtype: ir.DataType, shape: Sequence[int | str]
) -> ir.Value:
    value.name, value.type, value.shape = name, ir.TensorType(dtype), ir.Shape(shape)
    return value
