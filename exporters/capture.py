"""What a model multiplies its weights with: Gram matrices of every layer's input.

A graph with float32 activations gets the inputs of its linear layers as outputs. Gram matrices are
collected for as many weights at a time as fit into `_GROUP_BYTES`, each group in a pass of its own
over the text that stops where the group ends, and wait on disk until a weight is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from headrace.exporters.graph.builder import GraphBuilder
from headrace.exporters.graph.linear import LinearFormat, MlpWeights, Weight, stacked_mlp
from headrace.exporters.validate import GraphRunner

Float = NDArray[np.float32]
_GROUP_BYTES = 2**30


class CapturingFormat:
    """Another format, which also remembers what each weight is multiplied with."""

    def __init__(self, inner: LinearFormat) -> None:
        self._inner = inner
        self.name = inner.name
        self.inputs: dict[str, tuple[ir.Value, int]] = {}  # weight name: value [N, in] and in

    def linear(self, g: GraphBuilder, x: ir.Value, weight: Weight) -> ir.Value:
        self.inputs[weight.name] = (x, weight.shape[1])
        return self._inner.linear(g, x, weight)

    def embed(self, g: GraphBuilder, ids: ir.Value, weight: Weight) -> ir.Value:
        return self._inner.embed(g, ids, weight)

    def tied_head(self, g: GraphBuilder, x: ir.Value, weight: Weight) -> ir.Value:
        self.inputs[weight.name] = (x, weight.shape[1])
        return self._inner.tied_head(g, x, weight)

    def gated_mlp(self, g: GraphBuilder, x: ir.Value, weights: MlpWeights) -> ir.Value:
        return stacked_mlp(self, g, x, weights)


class Grams:
    """Gram matrices on disk, by the name of a checkpoint tensor without `.weight`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Path] = {}

    def save(self, weight_name: str, gram: Float) -> None:
        """Of a weight or of several stacked ones, which share their input."""
        file = self._folder / f"gram-{len(self._files)}.npy"
        np.save(file, gram)
        self._files |= dict.fromkeys(weight_name.split("+"), file)

    def load(self, name: str) -> Float | None:
        """float32 [in, in], or None where nothing was seen."""
        file = self._files.get(name)
        return None if file is None else np.asarray(np.load(file), np.float32)


def collect_grams(
    build: Callable[[CapturingFormat], ir.Model],
    inner: LinearFormat,
    chunks: Sequence[Sequence[int]],
    folder: Path,
    on_chunk: Callable[[GraphRunner | None], None],
) -> Grams:
    """Run the text through the model and collect what all its linear layers see.

    Args:
        build: makes a new graph with this format.
        inner: a format with float32 activations.
        folder: for the graphs, beside the weight file that they use, and for the matrices.
        on_chunk: called after each chunk of each pass; in the last pass, which runs the whole
            model, with its runner, whose cache holds the chunk.
    """
    grams = Grams(folder)
    capacity = max(map(len, chunks))
    first = CapturingFormat(inner)
    build(first)
    groups = list(_groups({name: width for name, (_, width) in first.inputs.items()}))
    for number, names in enumerate(groups):
        last = number == len(groups) - 1
        formats = CapturingFormat(inner)
        model = build(formats)
        taken = {name: formats.inputs[name][0] for name in names}
        _keep_outputs(model, list(taken.values()), caches=last)
        path = folder / f"capture-{number}.onnx"
        ir.save(model, path)
        runner = GraphRunner(path, capacity)
        sums = {n: np.zeros((w, w), np.float32) for n, w in names.items()}
        for chunk in chunks:
            runner.reset()
            outputs = runner.append(list(chunk))
            for name, value in taken.items():
                seen = outputs[value.name or ""]
                sums[name] += seen.T @ seen
            on_chunk(runner if last else None)
        for name, total in sums.items():
            grams.save(name, total)
    return grams


def _groups(widths: dict[str, int]) -> Iterator[dict[str, int]]:
    """Weights in graph order, as many together as may be."""
    group: dict[str, int] = {}
    for name, width in widths.items():
        if group and 4 * (sum(w * w for w in group.values()) + width * width) > _GROUP_BYTES:
            yield group
            group = {}
        group[name] = width
    yield group


def _keep_outputs(model: ir.Model, values: Sequence[ir.Value], *, caches: bool) -> None:
    """Let the graph give these values, each once, and its caches; drop what is not needed."""
    kept = [o for o in model.graph.outputs if caches and (o.name or "").startswith("present_")]
    for value in dict.fromkeys(values):
        value.type = ir.TensorType(ir.DataType.FLOAT)
        kept.append(value)
    model.graph.outputs[:] = kept
    RemoveUnusedNodesPass()(model)
