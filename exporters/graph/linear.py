"""Linear layers, embedding and head, one class for each way of storing a weight.

A `LinearFormat` turns a weight into initializers and nodes. `Weight` is where a weight comes from:
one checkpoint tensor, or several that are stacked along their outputs (q, k, v; gate, up).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from headrace.exporters.graph.activation import emit_activation
from headrace.exporters.graph.builder import MICROSOFT, GraphBuilder
from headrace.exporters.graph.functions import MIX_WIDTH, row_quant_gated_mlp, row_quant_matmul
from headrace.exporters.graph.mixing import mix_runs, mixing_matrix
from headrace.exporters.quant.formats import (
    Blocks,
    Float,
    RowInt8,
    quantize_blocks_4bit,
    quantize_blocks_8bit,
    quantize_row_int8,
)

Array = NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix [out, in] to be stored under `name`.

    Attributes:
        load: reads it, float32 [out, in].
        blocks: its quantized blocks exactly as the checkpoint holds them, or None.
        gram: sum of x x' over what the layer was seen to multiply, float32 [in, in], or None.
        trained: what training made of it in its format, to be stored as it is, or None.
    """

    name: str
    shape: tuple[int, int]
    load: Callable[[], Float]
    blocks: Callable[[], Blocks | None]
    gram: Callable[[], Float | None] = lambda: None
    trained: Callable[[], RowInt8 | Blocks | None] = lambda: None


@dataclass(frozen=True, slots=True)
class Bias:
    """A vector [out] to be stored under `name`."""

    name: str
    load: Callable[[], Float]


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """Of one MLP; a format takes gate and up apart or as `gate_up`, which is `up` without a gate.

    `activation` is one of `graph.activation`.
    """

    gate: Weight | None
    up: Weight
    gate_up: Weight
    down: Weight
    gate_up_bias: Bias | None
    down_bias: Bias | None
    activation: str


class LinearFormat(Protocol):
    """How a weight is stored and multiplied. `name` goes into the manifest."""

    @property
    def name(self) -> str: ...

    def linear(self, g: GraphBuilder, x: ir.Value, weight: Weight) -> ir.Value:
        """float32 [N, in] -> float32 [N, out]."""
        ...

    def embed(self, g: GraphBuilder, ids: ir.Value, weight: Weight) -> ir.Value:
        """int64 [N] -> float32 [N, in]: rows of the weight."""
        ...

    def tied_head(self, g: GraphBuilder, x: ir.Value, weight: Weight) -> ir.Value:
        """`linear` with a weight that `embed` stores already."""
        ...

    def gated_mlp(self, g: GraphBuilder, x: ir.Value, weights: MlpWeights) -> ir.Value:
        """down(activation(gate(x)) * up(x)), float32 [N, hidden] -> [N, hidden]; without a gate
        down(activation(up(x)))."""
        ...


def stacked_mlp(
    fmt: LinearFormat,
    g: GraphBuilder,
    x: ir.Value,
    weights: MlpWeights,
    down: Callable[[GraphBuilder, ir.Value, Weight], ir.Value] | None = None,
) -> ir.Value:
    """The MLP with gate and up as one product; `down` replaces `fmt.linear` for the last."""
    both = add_bias(g, fmt.linear(g, x, weights.gate_up), weights.gate_up_bias)
    if weights.gate is None:
        hidden = emit_activation(g, both, weights.activation)
    else:
        gate, up = g.ops("Split", both, outputs=2, attributes={"axis": 1, "num_outputs": 2})
        hidden = g.op("Mul", emit_activation(g, gate, weights.activation), up)
    return add_bias(g, (down or fmt.linear)(g, hidden, weights.down), weights.down_bias)


def add_bias(g: GraphBuilder, y: ir.Value, bias: Bias | None) -> ir.Value:
    if bias is None:
        return y
    return g.op("Add", y, g.weight(bias.name, lambda: bias.load().astype(g.activations)))


class Float32:
    """Plain MatMul; the specification of the others."""

    name = "fp32"
    dtype: type[np.float32 | np.float16] = np.float32  # of weights and activations

    def linear(self, g: GraphBuilder, x: ir.Value, weight: Weight) -> ir.Value:
        g.store.describe(weight.name, weight.shape, self.name)
        transposed = g.weight(
            f"{weight.name}.transposed", lambda: np.ascontiguousarray(self._load(weight).T)
        )
        return g.op("MatMul", x, transposed)

    def embed(self, g: GraphBuilder, ids: ir.Value, weight: Weight) -> ir.Value:
        g.store.describe(weight.name, weight.shape, self.name)
        return g.op("Gather", g.weight(weight.name, lambda: self._load(weight)), ids)

    def tied_head(self, g: GraphBuilder, x: ir.Value, weight: Weight) -> ir.Value:
        stored = g.weight(weight.name, lambda: self._load(weight))
        return g.op("Gemm", x, stored, attributes={"transB": 1})

    def gated_mlp(self, g: GraphBuilder, x: ir.Value, weights: MlpWeights) -> ir.Value:
        return stacked_mlp(self, g, x, weights)

    def _load(self, weight: Weight) -> NDArray[np.float32 | np.float16]:
        return weight.load().astype(self.dtype, copy=False)


class Float16(Float32):
    """The same with halves, for graphs whose activations are halves."""

    name = "fp16"
    dtype = np.float16


class RowInt8Format:
    """INT8 weights, one scale an output channel; activations INT8, one scale a row.

    `max_code` of weights is 127, or 63 for kernels that would saturate (`quant.formats`).
    """

    def __init__(self, name: str = "w8a8_row", max_code: int = 127) -> None:
        self.name, self._max_code = name, max_code

    def linear(self, g: GraphBuilder, x: ir.Value, weight: Weight) -> ir.Value:
        return g.call(row_quant_matmul(), x, *self._columns(g, weight), _middle(g, x))

    def embed(self, g: GraphBuilder, ids: ir.Value, weight: Weight) -> ir.Value:
        codes, scales = self._rows(g, weight)
        rows = g.op("Cast", g.op("Gather", codes, ids), attributes={"to": ir.DataType.FLOAT})
        scale = g.op("Gather", g.op("Unsqueeze", scales, g.constant("axis_1", _ints(1))), ids)
        return g.op("Mul", rows, scale)

    def tied_head(self, g: GraphBuilder, x: ir.Value, weight: Weight) -> ir.Value:
        # The transposition is folded when the session is made; the file holds the codes once.
        codes, scales = self._rows(g, weight)
        return g.call(row_quant_matmul(), x, g.op("Transpose", codes), scales, _middle(g, x))

    def gated_mlp(self, g: GraphBuilder, x: ir.Value, weights: MlpWeights) -> ir.Value:
        gate, width = weights.gate, weights.down.shape[1]
        biased = weights.gate_up_bias is not None or weights.down_bias is not None
        if gate is None or biased or width % MIX_WIDTH or weights.activation != "silu":
            return stacked_mlp(self, g, x, weights, self.mixed_linear)
        mixed = mixed_weight(weights.down)
        stored = [v for w in (gate, weights.up, mixed) for v in self._columns(g, w)]
        mix = g.constant("mix", mixing_matrix())
        shape = g.constant("mixed_shape", _ints(-1, width))
        return g.call(row_quant_gated_mlp(), x, *stored, mix, shape, _middle(g, x))

    def mixed_linear(self, g: GraphBuilder, x: ir.Value, weight: Weight) -> ir.Value:
        """`linear` with inputs mixed as `gated_mlp` mixes those of `down`."""
        if weight.shape[1] % MIX_WIDTH:
            return self.linear(g, x, weight)
        runs = g.op("Reshape", x, g.constant("runs_shape", _ints(-1, MIX_WIDTH)))
        mixed = g.op("MatMul", runs, g.constant("mix", mixing_matrix()))
        shape = g.constant(f"mixed_shape_{weight.shape[1]}", _ints(-1, weight.shape[1]))
        return self.linear(g, g.op("Reshape", mixed, shape), mixed_weight(weight))

    def quantize(self, weight: Weight) -> RowInt8:
        """What is stored of a weight."""
        trained = weight.trained()
        if isinstance(trained, RowInt8) and trained.max_code == self._max_code:
            return trained
        return quantize_row_int8(weight.load(), weight.gram(), self._max_code)

    def _columns(self, g: GraphBuilder, weight: Weight) -> tuple[ir.Value, ir.Value]:
        """Codes [in, out], as the product wants them, and scales."""
        g.store.describe(weight.name, weight.shape, self.name)
        quantized = cache(lambda: self.quantize(weight))
        codes = g.weight(
            f"{weight.name}.codes_t", lambda: np.ascontiguousarray(quantized().codes.T)
        )
        return codes, g.weight(f"{weight.name}.scales", lambda: quantized().scales)

    def _rows(self, g: GraphBuilder, weight: Weight) -> tuple[ir.Value, ir.Value]:
        """Codes [out, in], as a lookup wants them, and scales."""
        g.store.describe(weight.name, weight.shape, self.name)
        quantized = cache(lambda: self.quantize(weight))
        codes = g.weight(f"{weight.name}.codes", lambda: quantized().codes)
        return codes, g.weight(f"{weight.name}.scales", lambda: quantized().scales)


def mixed_weight(weight: Weight) -> Weight:
    """The weight for inputs of which every run of MIX_WIDTH is mixed.

    A weight that was trained for row INT8 was trained for these inputs.
    """

    def gram() -> Float | None:
        plain = weight.gram()
        return None if plain is None else mix_runs(mix_runs(plain).T)

    return replace(weight, load=lambda: mix_runs(weight.load()), blocks=lambda: None, gram=gram)


def _middle(g: GraphBuilder, x: ir.Value) -> ir.Value:
    """Zero points of the rows of x, uint8 [N, 1]: one tensor for all products of those rows."""

    def make() -> ir.Value:
        ends = [g.constant(f"end_{n}", _ints(n)) for n in (0, 1)]
        rows = g.op("Slice", g.op("Shape", x), *ends)
        shape = g.op("Concat", rows, ends[1], attributes={"axis": 0})
        return g.op("Expand", g.constant("middle_code", np.array(128, np.uint8)), shape)

    return g.once_per_row_set("middle", make)


class BlockFormat:
    """MatMulNBits: weights in blocks, halved down to 16 until they divide the width.

    A weight whose width is no multiple of 16 is kept as `plain` does, whose type scales have, too.
    `accuracy_level` 4 quantizes activations to INT8 in blocks, 1 keeps them float32; of no meaning
    for activations in float16.
    `lossless` takes over a checkpoint's own blocks where MatMulNBits can hold them. The embedding
    and a head tied to it are 8-bit, or the checkpoint's own blocks if those are symmetric:
    GatherBlockQuantized takes no float zero points.
    """

    def __init__(
        self,
        name: str,
        bits: int,
        block_size: int = 32,
        *,
        accuracy_level: int = 4,
        lossless: bool = False,
        plain: Float32 | None = None,
    ) -> None:
        self.name = name
        self._plain = plain or Float32()
        self._bits, self._block_size = bits, block_size
        self._accuracy_level, self._lossless = accuracy_level, lossless
        self._layouts: dict[str, _BlockLayout] = {}

    @property
    def quantizes_activations(self) -> bool:
        return self._accuracy_level == 4

    def quantize(self, weight: Weight, *, embedding: bool = False) -> Blocks | None:
        """What is stored of a weight; None where that is float32."""
        if self._fitting(weight) is None:
            return None
        return self._quantize(weight, 8 if embedding else self._bits, embedding)

    def linear(self, g: GraphBuilder, x: ir.Value, weight: Weight) -> ir.Value:
        if self._fitting(weight) is None:
            return self._plain.linear(g, x, weight)
        return self._matmul(g, x, weight, self._bits, embedding=False)

    def embed(self, g: GraphBuilder, ids: ir.Value, weight: Weight) -> ir.Value:
        if self._fitting(weight) is None:
            return self._plain.embed(g, ids, weight)
        layout = self._store(g, weight, 8, embedding=True)
        flat = g.op("Reshape", g.weight(f"{weight.name}.blocks", _written), _keep_flat(g))
        return g.op(
            "GatherBlockQuantized",
            flat,
            ids,
            g.weight(f"{weight.name}.scales", _written),
            domain=MICROSOFT,
            attributes={
                "bits": layout.bits,
                "block_size": layout.block_size,
                "gather_axis": 0,
                "quantize_axis": 1,
            },
        )

    def tied_head(self, g: GraphBuilder, x: ir.Value, weight: Weight) -> ir.Value:
        if self._fitting(weight) is None:
            return self._plain.tied_head(g, x, weight)
        return self._matmul(g, x, weight, 8, embedding=True)

    def gated_mlp(self, g: GraphBuilder, x: ir.Value, weights: MlpWeights) -> ir.Value:
        return stacked_mlp(self, g, x, weights)

    def _matmul(
        self, g: GraphBuilder, x: ir.Value, weight: Weight, bits: int, *, embedding: bool
    ) -> ir.Value:
        layout = self._store(g, weight, bits, embedding=embedding)
        parts = ["blocks", "scales"] + ["zero_points"] * layout.has_zero_points
        return g.op(
            "MatMulNBits",
            x,
            *(g.weight(f"{weight.name}.{part}", _written) for part in parts),
            domain=MICROSOFT,
            attributes={
                "K": weight.shape[1],
                "N": weight.shape[0],
                "bits": layout.bits,
                "block_size": layout.block_size,
                "accuracy_level": self._accuracy_level,
            },
        )

    def _store(
        self, g: GraphBuilder, weight: Weight, bits: int, *, embedding: bool
    ) -> _BlockLayout:
        """Write the weight unless an earlier graph or layer did; returns how it is laid out."""
        layout = self._layouts.get(weight.name)
        if layout is None:
            blocks = self._quantize(weight, bits, embedding)
            layout = _BlockLayout(blocks.bits, blocks.block_size, blocks.zero_points is not None)
            self._layouts[weight.name] = layout
            g.store.describe(weight.name, weight.shape, f"{self.name}/{blocks.bits}bit")
            g.weight(f"{weight.name}.blocks", lambda: blocks.codes)
            g.weight(f"{weight.name}.scales", lambda: blocks.scales.astype(self._plain.dtype))
            if (zero_points := blocks.zero_points) is not None:
                g.weight(f"{weight.name}.zero_points", lambda: zero_points)
        return layout

    def _quantize(self, weight: Weight, bits: int, embedding: bool) -> Blocks:
        own = weight.blocks() if self._lossless else None
        if own is not None and not (embedding and own.zero_points is not None):
            return own
        size = self._fitting(weight)
        assert size is not None
        trained = weight.trained()
        if isinstance(trained, Blocks) and (trained.bits, trained.block_size) == (bits, size):
            return trained
        if bits == 8:
            return quantize_blocks_8bit(weight.load(), size)
        return quantize_blocks_4bit(weight.load(), size, weight.gram())

    def _fitting(self, weight: Weight) -> int | None:
        """The largest block size up to ours that divides the width; MatMulNBits takes 16 and up."""
        sizes = (self._block_size >> n for n in range(8) if self._block_size >> n >= 16)
        return next((size for size in sizes if weight.shape[1] % size == 0), None)


@dataclass(frozen=True, slots=True)
class _BlockLayout:
    bits: int
    block_size: int
    has_zero_points: bool


def _written() -> Array:
    raise AssertionError("the weight is stored before it is used")


def _keep_flat(g: GraphBuilder) -> ir.Value:
    return g.constant("keep_flat", _ints(0, -1))


def _ints(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)
