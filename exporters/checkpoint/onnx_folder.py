"""A Hugging Face folder whose weights are in an ONNX file, as optimum exports it.

Tracing keeps the names of vectors and tables, but stores the matrix of a linear layer transposed
and under a number. It gets its name back from its bias: the product `x @ W'` is followed by a node
that adds `layer.bias`, so it is `layer.weight`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir

from headrace.exporters.checkpoint.hf_config import CONFIG_FILE, normalize_config
from headrace.exporters.checkpoint.json_files import read_object
from headrace.exporters.checkpoint.tokenizer_hf import tokenizer_from_folder
from headrace.exporters.checkpoint.values import Checkpoint, Float, LazyTensor
from headrace.runtime.errors import CheckpointError

_PLACES = ("model.onnx", "onnx/model.onnx")
_BIAS = ".bias"


def find_onnx(folder: Path) -> Path | None:
    """The ONNX file of a folder, where those are usually put."""
    return next((folder / place for place in _PLACES if (folder / place).is_file()), None)


def open_onnx(folder: Path, file: Path) -> Checkpoint:
    """Open a folder with config.json and an ONNX file.

    Raises:
        CheckpointError: a file is missing or damaged, or is no float model.
    """
    raw_config = read_object(folder / CONFIG_FILE)
    try:
        graph = ir.load(file).graph
    except Exception as error:  # protobuf's errors have no common class
        raise CheckpointError(
            f"{file} is not a complete ONNX file: {' '.join(str(error).split())}; export it again"
        ) from None
    tensors = dict(_tensors(graph, file))
    return Checkpoint(
        format="onnx",
        path=folder,
        weight_files=tuple(_weight_files(graph, file)),
        config=normalize_config(raw_config, tensors, folder / CONFIG_FILE),
        tensors=tensors,
        make_tokenizer=partial(tokenizer_from_folder, folder, raw_config),
        resources=ExitStack(),
    )


def _tensors(graph: ir.Graph, file: Path) -> Iterator[tuple[str, LazyTensor]]:
    values = graph.initializers
    for name, value in values.items():
        if value.const_value is not None:
            yield name, _lazy(name, value.const_value, file, transposed=False)
    for node in graph:
        if node.op_type == "MatMul" and (named := _layer_of(node, values)) is not None:
            layer, tensor = named
            yield f"{layer}.weight", _lazy(f"{layer}.weight", tensor, file, transposed=True)


def _layer_of(
    product: ir.Node, values: Mapping[str, ir.Value]
) -> tuple[str, ir.TensorProtocol] | None:
    """The layer whose bias is added to a product with a stored matrix, and that matrix."""
    matrix = product.inputs[1]
    tensor = None if matrix is None else matrix.const_value
    if tensor is None or len(tensor.shape) != 2:
        return None
    for user in product.outputs[0].consumers():
        for value in user.inputs:
            name = None if value is None else value.name
            if name in values and name is not None and name.endswith(_BIAS):
                return name.removesuffix(_BIAS), tensor
    return None


def _lazy(name: str, tensor: ir.TensorProtocol, file: Path, *, transposed: bool) -> LazyTensor:
    shape = tuple(tensor.shape.numpy())
    return LazyTensor(
        name=name,
        shape=shape[::-1] if transposed else shape,
        dtype=tensor.dtype.name,
        loader=partial(_load, name, tensor, file, transposed),
    )


def _load(name: str, tensor: ir.TensorProtocol, file: Path, transposed: bool) -> Float:
    if not tensor.dtype.is_floating_point():
        raise CheckpointError(
            f"{file}: tensor {name!r} has type {tensor.dtype.name}; give the float model, it is "
            "quantized here"
        )
    try:
        values = tensor.numpy().astype(np.float32)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: tensor {name!r} cannot be read: {error}") from None
    return np.ascontiguousarray(values.T) if transposed else values


def _weight_files(graph: ir.Graph, file: Path) -> Iterator[Path]:
    """The ONNX file and those beside it that hold its tensors."""
    yield file
    places = {
        Path(value.const_value.path)
        for value in graph.initializers.values()
        if isinstance(value.const_value, ir.ExternalTensor)
    }
    for place in sorted(places):
        if not place.resolve().is_relative_to(file.parent.resolve()):
            raise CheckpointError(f"{file} names {str(place)!r}, which is not in its folder")
        if not place.is_file():
            raise CheckpointError(f"{file} names {place.name!r}, which is missing; export it again")
        yield place
