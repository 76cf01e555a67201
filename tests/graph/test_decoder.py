"""The exported graph against the float64 reference, form against form, format against format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from reference_llama import forward
from tiny import read_folder

from headrace.exporters.checkpoint.source import open_checkpoint
from headrace.exporters.validate import GraphRunner
from headrace.runtime.manifest import read_manifest

PROMPT = [5, 17, 200, 3, 99, 42, 7, 130, 64, 11]
SHAPES = [
    {},
    {"tied": False},
    {"heads": 4, "kv_heads": 4},
    {"heads": 6, "kv_heads": 2, "hidden": 96},
    {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
]


def graph_file(package: Path, form: str = "ragged") -> Path:
    target = read_manifest(package).targets[0]
    return package / next(g.file for g in target.graphs if g.form == form)


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("options", SHAPES, ids=lambda o: "-".join(map(str, o)) or "plain")
@pytest.mark.parametrize("form", ["ragged", "uniform"])
def test_fp32_graph_is_the_reference(
    options: dict[str, object],
    form: str,
    tiny_package: Callable[..., Path],
    tiny_checkpoint: Callable[..., Path],
) -> None:
    tensors, config = read_folder(tiny_checkpoint(**options))
    expected = forward(tensors, config, PROMPT)
    runner = GraphRunner(graph_file(tiny_package("fp32", **options), form), 64)
    prefill = runner.run(PROMPT[:6])
    decode = [runner.run([token])[0] for token in PROMPT[6:]]
    actual = np.concatenate([prefill, np.stack(decode)])
    assert relative_error(actual, expected) < 1e-3


@pytest.mark.parametrize("tied", [True, False])
def test_rotation_changes_the_basis_and_not_the_answer(
    tied: bool, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """The rotated weights in float32 give what the plain ones give."""
    from headrace.exporters.archs.registry import decoder_spec
    from headrace.exporters.graph.decoder import DecoderParts, build_decoder
    from headrace.exporters.graph.linear import Float32
    from headrace.exporters.graph.weights import WeightStore
    from headrace.exporters.rotation import RotatedSource
    from headrace.exporters.weight_source import WeightSource

    folder = tiny_checkpoint(tied=tied)
    tensors, config = read_folder(folder)
    with open_checkpoint(folder) as checkpoint:
        spec = decoder_spec(checkpoint.config)
        source = RotatedSource(WeightSource(checkpoint.tensors), spec)
        parts = DecoderParts(
            spec=spec,
            weight=source.weight,
            vector=source.vector,
            layer_format=Float32(),
            head_format=Float32(),
            kv_scales=None,
            head_matrix=source.head_matrix,
        )
        with WeightStore(tmp_path, "weights.bin") as store:
            ir.save(build_decoder(parts, store, "ragged"), tmp_path / "rotated.onnx")
    actual = GraphRunner(tmp_path / "rotated.onnx", 64).run(PROMPT)
    assert relative_error(actual, forward(tensors, config, PROMPT)) < 1e-3


@pytest.mark.parametrize(
    ("precision", "kv_cache", "bound"),
    [
        ("w8a8_row", "fp32", 0.12),
        # Tokens that calibration text does not have are clipped, hence the wide bound.
        ("w8a8_row", "int8", 0.5),
        ("w8a8_block", "fp32", 0.10),
        ("w8a8_block", "int8", 0.5),
        ("w4a8_block", "fp32", 0.5),
        ("keep", "fp32", 0.10),
    ],
)
def test_quantized_graphs_stay_near_the_reference(
    precision: str,
    kv_cache: str,
    bound: float,
    tiny_package: Callable[..., Path],
    tiny_checkpoint: Callable[..., Path],
) -> None:
    tensors, config = read_folder(tiny_checkpoint())
    expected = forward(tensors, config, PROMPT)
    # Four bits are rounded for the text they were calibrated on, which these tokens are not.
    package = tiny_package(precision, kv_cache, calibrate=precision != "w4a8_block")
    runner = GraphRunner(graph_file(package), 64)
    assert 0 < relative_error(runner.run(PROMPT), expected) < bound


@pytest.mark.parametrize("precision", ["w8a8_row", "w8a8_block", "w4a8_block"])
@pytest.mark.parametrize("form", ["uniform", "tree"])
def test_forms_agree(precision: str, form: str, tiny_package: Callable[..., Path]) -> None:
    """The same bits from every form: `tree` is given a chain, which is what `ragged` computes."""
    package = tiny_package(precision, "int8")
    expected = GraphRunner(graph_file(package, "ragged"), 64).run(PROMPT)
    if form == "uniform":
        actual = GraphRunner(graph_file(package, form), 64).run(PROMPT)
    else:
        actual = _run_tree_as_chain(graph_file(package, form), PROMPT, capacity=64)
    np.testing.assert_array_equal(actual, expected)


def _run_tree_as_chain(graph: Path, tokens: list[int], capacity: int) -> np.ndarray:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")
    session = ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    n = len(tokens)
    span = np.arange(n)
    feeds = {
        "input_ids": np.array(tokens),
        "gather_index": span[None],
        "scatter_index": span,
        "seqlens_k": np.array([n - 1], np.int32),
        "total_tokens": np.array(capacity, np.int32),
        "query_seqlens": np.array([n], np.int32),
        "logits_index": span,
        "inverse_temperature": np.zeros((n, 1), np.float32),
        "position_ids": span[None],
        "attention_bias": np.zeros((1, 1, n, capacity), np.float32),
    }
    for info in session.get_inputs():
        if info.name.startswith("past_"):
            dtype = np.int8 if info.type == "tensor(int8)" else np.float32
            feeds[info.name] = np.zeros((1, info.shape[1], capacity, info.shape[3]), dtype)
    return np.asarray(session.run(["logits"], feeds)[0])


def test_entropy_is_of_the_softmax(tiny_package: Callable[..., Path]) -> None:
    runner = GraphRunner(graph_file(tiny_package("w8a8_row")), 64)
    logits, entropy = runner.run_with_entropy(PROMPT)
    p = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(entropy, -(p * np.log(p)).sum(axis=1), atol=1e-4)


def test_graph_passes_the_onnx_checker_where_it_knows_the_operators(
    tiny_package: Callable[..., Path],
) -> None:
    """Structure, names and types; operators of other domains are not looked into."""
    onnx.checker.check_model(str(graph_file(tiny_package("w8a8_row"))))


def test_all_forms_share_one_weight_file(tiny_package: Callable[..., Path]) -> None:
    package = tiny_package("w8a8_row", "int8")
    target = read_manifest(package, verify_hashes=True).targets[0]
    files = sorted(path.name for path in (package / target.name).iterdir())
    assert files == ["ragged.onnx", "tree.onnx", "uniform.onnx", "weights.bin"]
    assert (package / target.name / "weights.bin").stat().st_size == target.weight_bytes
