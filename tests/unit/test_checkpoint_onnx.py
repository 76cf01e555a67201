"""An encoder's weights from an ONNX file that was traced: names of matrices come back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from safetensors.numpy import load_file
from tiny_bert import write_tiny_bert

from headrace.exporters.checkpoint.source import open_checkpoint
from headrace.exporters.encoder_package import export_encoder
from headrace.runtime.encoder.embedder import Embedder
from headrace.runtime.errors import CheckpointError


def traced(source: Path, *, external: bool = False, dtype: type = np.float32) -> Path:
    """Replace the weights by an ONNX file in which, as a tracer leaves it, vectors and tables have
    their names, and every linear layer is a product with a numbered, transposed matrix and the
    addition of its bias. The nodes of attention are left out."""
    file = source / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    tape = ir.tape.Tape()
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["N", 64]))
    initializers, outputs = [], []

    def stored(name: str, array: np.ndarray) -> ir.Value:
        value = tape.initializer(ir.tensor(array, name=name), name)
        initializers.append(value)
        return value

    for number, (name, array) in enumerate(tensors.items()):
        layer, _, part = name.rpartition(".")
        linear = f"{layer}.bias" in tensors and array.ndim == 2
        if linear and part == "weight":
            matrix = np.ascontiguousarray(array.T).astype(dtype)
            product = tape.op("MatMul", [x, stored(f"onnx::MatMul_{number}", matrix)])
            outputs.append(
                tape.op("Add", [stored(f"{layer}.bias", tensors[f"{layer}.bias"]), product])
            )
        elif not (part == "bias" and tensors[f"{layer}.weight"].ndim == 2):
            stored(name, array)
    for number, value in enumerate(outputs):
        value.name = f"y{number}"
    graph = ir.Graph(
        [x], outputs, nodes=tape.nodes, initializers=initializers, opset_imports={"": 18}
    )
    model = ir.Model(graph, ir_version=10)
    ir.save(model, source / "model.onnx", external_data="model.onnx_data" if external else None)
    return source


@pytest.mark.parametrize("external", [False, True])
def test_the_package_is_that_of_safetensors(tmp_path: Path, external: bool) -> None:
    source = write_tiny_bert(tmp_path / "source")
    export_encoder(source, tmp_path / "plain", precision="fp32")
    traced(source, external=external)
    manifest = export_encoder(source, tmp_path / "traced", precision="fp32").manifest
    assert manifest.source.format == "onnx"
    with Embedder.load(tmp_path / "plain") as a, Embedder.load(tmp_path / "traced") as b:
        assert a.embed(["a text", "b"]).tobytes() == b.embed(["a text", "b"]).tobytes()


def test_a_quantized_file_is_refused(tmp_path: Path) -> None:
    source = traced(write_tiny_bert(tmp_path / "source"), dtype=np.int8)
    with pytest.raises(CheckpointError, match=r"type INT8; give the float model"):
        export_encoder(source, tmp_path / "package", precision="fp32")


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    source = traced(write_tiny_bert(tmp_path / "source"))
    (source / "model.onnx").write_bytes((source / "model.onnx").read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="not a complete ONNX file"):
        open_checkpoint(source)


def test_data_outside_of_the_folder_is_refused(tmp_path: Path) -> None:
    source = traced(write_tiny_bert(tmp_path / "source"), external=True)
    content = (source / "model.onnx").read_bytes()
    assert b"model.onnx_data" in content
    (source / "model.onnx").write_bytes(content.replace(b"model.onnx_data", b"../../../secret"))
    with pytest.raises(CheckpointError, match=r"not in its folder|not a complete ONNX file"):
        open_checkpoint(source)


def test_missing_data_is_named(tmp_path: Path) -> None:
    source = traced(write_tiny_bert(tmp_path / "source"), external=True)
    (source / "model.onnx_data").unlink()
    with pytest.raises(CheckpointError, match=r"model.onnx_data.*missing"):
        open_checkpoint(source)


def test_safetensors_come_first(tmp_path: Path) -> None:
    source = write_tiny_bert(tmp_path / "source")
    (source / "model.onnx").write_bytes(b"anything")
    with open_checkpoint(source) as checkpoint:
        assert checkpoint.format == "safetensors"
