"""Graphs of ranks, run in one process with numpy's sums, against the graph of one process.

FP32 differs by the order of sums only. Row INT8 rounds a rank's part of a row by itself; FP16 as in
test_cuda_graphs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from architectures import write_model
from contrib_ops import evaluator
from ranks import CAPACITY, Ranks

from headrace.exporters.package import export_package
from headrace.exporters.validate import GraphRunner
from headrace.runtime.errors import ConfigError, ExportError, PackageError
from headrace.runtime.fidelity import log_softmax, mean_kl_nats
from headrace.runtime.manifest import Manifest, read_manifest
from headrace.runtime.planning.estimate import weight_bytes
from headrace.runtime.planning.shapes import Share, shape_of_package

RNG = np.random.default_rng(5)
CHUNKS = [RNG.integers(3, 250, n).tolist() for n in (11, 1, 1, 4)]
TOLERANCE = 1e-4
FP16_TOLERANCE = 0.006  # of the logits' size
LLAMA = {"bias": True, "tied": False, "vocab": 257}
# Biases; uneven heads; norms of heads; norms behind parts, soft caps; GPT's layers and positions.
MODELS: dict[str, tuple[dict[str, Any] | None, int]] = {
    "llama": (LLAMA, 2),
    "llama in four": (LLAMA, 4),
    "llama 9 heads of 3": ({"hidden": 144, "heads": 9, "kv_heads": 3}, 2),
    "qwen3_bias_untied": (None, 2),
    "gemma2": (None, 2),
    "gpt2": (None, 2),
    "phi3_partial_longrope": (None, 2),
}


def source_of(name: str, folder: Path, tiny_checkpoint: Callable[..., Path]) -> Path:
    options = MODELS[name][0]
    return write_model(name, folder) if options is None else tiny_checkpoint(**options)


@pytest.fixture(params=MODELS)
def model(
    request: pytest.FixtureRequest, tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> tuple[Path, int]:
    """A checkpoint and how many ranks are to share it."""
    source = source_of(request.param, tmp_path / "hf", tiny_checkpoint)
    return source, MODELS[request.param][1]


def export(source: Path, folder: Path, **options: Any) -> Manifest:
    export_package(source, folder, **{"calibrate": False, "forms": ("ragged",), **options})
    return read_manifest(folder, verify_hashes=True)


def entropy_of(logits: np.ndarray) -> np.ndarray:
    log_p = log_softmax(logits.astype(np.float64))
    return np.asarray(-(np.exp(log_p) * log_p).sum(axis=1))


def test_fp32_is_the_same(model: tuple[Path, int], tmp_path: Path) -> None:
    source, count = model
    export(source, tmp_path / "one", precision="fp32")
    manifest = export(source, tmp_path / "many", precision="fp32", tensor_parallel=count)
    (target,) = manifest.targets
    assert len(target.ranks) == count and not target.graphs
    one = GraphRunner(tmp_path / "one" / "cpu_fp32" / "ragged.onnx", CAPACITY)
    many = Ranks(tmp_path / "many", "cpu_fp32")
    for chunk in CHUNKS:
        expected = one.run(chunk)
        said = many.run(chunk)
        assert np.abs(said.logits - expected).max() < TOLERANCE
        np.testing.assert_array_equal(said.logits.argmax(axis=1), expected.argmax(axis=1))
        np.testing.assert_allclose(said.entropy, entropy_of(said.logits), atol=1e-5)
        peak = said.logits.max(axis=1, keepdims=True).astype(np.float64)
        whole = peak[:, 0] + np.log(np.exp(said.logits - peak).sum(axis=1))
        np.testing.assert_allclose(said.log_sum_exp, whole, rtol=1e-6)


def test_row_int8(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    """Calibrated, with an INT8 cache, as by default."""
    source = tiny_checkpoint()
    export(source, tmp_path / "one", precision="fp32")
    options = {"calibrate": True, "kv_cache": "int8", "tensor_parallel": 2}
    manifest = export(source, tmp_path / "many", precision="w8a8_row", **options)
    assert {t.format for t in manifest.targets[0].tensors} == {"w8a8_row", "fp32"}
    one = GraphRunner(tmp_path / "one" / "cpu_fp32" / "ragged.onnx", CAPACITY)
    many = Ranks(tmp_path / "many", "cpu_int8")
    text = [token for chunk in CHUNKS for token in chunk]
    assert 0 < mean_kl_nats(log_softmax(one.run(text)), log_softmax(many.run(text).logits)) < 0.06


class Evaluated:
    """A session's names and `run`, computed in numpy."""

    def __init__(self, graph: Path) -> None:
        found = evaluator(graph)
        self.run = found.run
        self._inputs = [SimpleNamespace(name=name) for name in found.input_names]
        self._outputs = [SimpleNamespace(name=name) for name in found.output_names]

    def get_inputs(self) -> list[SimpleNamespace]:
        return self._inputs

    def get_outputs(self) -> list[SimpleNamespace]:
        return self._outputs


@pytest.mark.parametrize("target", ["cuda_fp16", "cuda_w8"])
@pytest.mark.parametrize("name", ["llama", "qwen3_bias_untied", "gpt2"])
def test_cuda_graphs(
    name: str, target: str, tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    source = source_of(name, tmp_path / "hf", tiny_checkpoint)
    export(source, tmp_path / "one", precision="w8a8_block" if target == "cuda_w8" else "fp32")
    export(source, tmp_path / "many", targets=(target,), tensor_parallel=2)
    (folder,) = (tmp_path / "one").glob("cpu_*")
    one, many = (
        GraphRunner(folder / "ragged.onnx", CAPACITY),
        Ranks(tmp_path / "many", target, Evaluated),
    )
    # The CPU's blocks are multiplied with rows that are rounded to 8 bits, too.
    tolerance = 0.03 if target == "cuda_w8" else FP16_TOLERANCE
    for chunk in CHUNKS[:3]:
        expected, said = one.run(chunk), many.run(chunk)
        error = np.sqrt(np.square(said.logits - expected).mean() / np.square(expected).mean())
        assert 0 < error < tolerance
        np.testing.assert_array_equal(said.likeliest, said.logits.argmax(axis=1))
        np.testing.assert_allclose(said.entropy, entropy_of(said.logits), atol=1e-4)


def test_every_piece_passes_the_onnx_checker(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    export(tiny_checkpoint(**LLAMA), tmp_path / "p", targets=("cuda_fp16",), tensor_parallel=2)
    files = sorted((tmp_path / "p" / "cuda_fp16").glob("*.onnx"))
    assert len(files) == 12
    for file in files:
        onnx.checker.check_model(str(file))


def stored(package: Path, files: tuple[str, ...]) -> dict[str, int]:
    """Bytes of a rank's weights by name, each once."""

    def tensors() -> Iterator[tuple[str, int]]:
        for file in files:
            graph = onnx.load(package / file, load_external_data=False).graph
            for tensor in graph.initializer:
                place = {entry.key: entry.value for entry in tensor.external_data}
                if place:
                    yield tensor.name, int(place["length"])

    return dict(tensors())


@pytest.mark.parametrize(
    ("name", "target", "bits", "ranks"),
    [("llama", "cuda_fp16", 16, 4), ("llama", "cuda_w8", 8, 2), ("gpt2", "cuda_fp16", 16, 2)],
)
def test_bytes_are_those_of_the_planner(
    name: str,
    target: str,
    bits: int,
    ranks: int,
    tmp_path: Path,
    tiny_checkpoint: Callable[..., Path],
) -> None:
    source = source_of(name, tmp_path / "hf", tiny_checkpoint)
    package = tmp_path / "package"
    manifest = export(source, package, targets=(target,), tensor_parallel=ranks)
    model, gpt = manifest.model, name == "gpt2"
    shape = dataclasses.replace(
        shape_of_package(name, model),
        biased=True,
        learned_positions=model.context_tokens if gpt else 0,
    )
    for rank, info in enumerate(manifest.targets[0].ranks):
        sizes = stored(package, info.graphs[0].files)
        assert sum(sizes.values()) == info.weight_bytes
        tables = sum(size for key, size in sizes.items() if key.startswith("rope"))
        # Biases of products are halves in graphs of halves, the planner counts them as float32;
        # it gives a norm of a model with biases one, too.
        halves = sum(2 * size // 2 for key, size in sizes.items() if _is_product_bias(key))
        norms = 0 if gpt else 4 * model.hidden_size * (2 * model.num_layers + 1)
        planned = weight_bytes(Share(shape, rank, ranks), bits) - norms
        assert sum(sizes.values()) - tables + halves == planned


def _is_product_bias(name: str) -> bool:
    return name.endswith("bias") and "ln_" not in name


def test_what_cannot_be_split(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    olmo = write_model("olmo2", tmp_path / "olmo")
    for source, options, error, message in (
        (olmo, {"tensor_parallel": 2}, ExportError, "normalizes queries across all heads"),
        (tiny_checkpoint(), {"tensor_parallel": 3}, ConfigError, "splits the 2 KV heads"),
        (tiny_checkpoint(), {"tensor_parallel": 1}, ConfigError, "2 or more"),
        (tiny_checkpoint(), {"tensor_parallel": 2, "precision": "keep"}, ConfigError, "rounds"),
    ):
        with pytest.raises(error, match=message):
            export(source, tmp_path / "none", **options)
    assert not (tmp_path / "none").exists()


def test_a_damaged_manifest(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    package = tmp_path / "package"
    export(tiny_checkpoint(), package, precision="fp32", tensor_parallel=2)
    path = package / "manifest.json"
    good = path.read_text("utf-8")
    for old, new in (
        ('"first_token": 128', '"first_token": 127'),
        ('"num_kv_heads": 1,', '"num_kv_heads": 0,'),
    ):
        assert old in good
        path.write_text(good.replace(old, new), "utf-8")
        with pytest.raises(PackageError, match="rank"):
            read_manifest(package)
