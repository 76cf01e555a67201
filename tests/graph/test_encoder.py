"""Encoder packages against a float64 reference, batched and alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from reference_bert import ReferenceBert
from tiny_bert import tiny_wordpiece, write_tiny_bert

from headrace.exporters.encoder_package import export_encoder
from headrace.exporters.encoder_runner import compare_vectors, encode_plainly
from headrace.runtime.encoder.embedder import Embedder, load_tokenizer
from headrace.runtime.encoder.manifest import read_encoder_manifest

TEXTS = [
    "a short one",
    "hello, world!",
    "x",
    "the quick brown fox jumps over 1 lazy dog.",
    "is it 10 or 11 o'clock",
    "what? never!",
    "b",
    "every text has a length of its own, and none of them waits",
]


def package(tmp_path: Path, precision: str, *args: object, **options: object) -> tuple[Path, Path]:
    source = write_tiny_bert(tmp_path / "source", *args, **options)
    export_encoder(source, tmp_path / "package", precision=precision)
    return source, tmp_path / "package"


def expected(source: Path, pooling: str = "mean", normalize: bool = True) -> np.ndarray:
    reference, tokenizer = ReferenceBert(source), tiny_wordpiece()
    tokenizer.no_padding()
    tokenizer.no_truncation()
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    return np.array([reference.vector(i, pooling, normalize) for i in ids])


@pytest.mark.parametrize("model_type", ["bert", "roberta", "xlm-roberta", "distilbert"])
def test_float32_is_the_reference(tmp_path: Path, model_type: str) -> None:
    source, folder = package(tmp_path, "fp32", model_type)
    with Embedder.load(folder) as embedder:
        vectors = embedder.embed(TEXTS)
    assert vectors.dtype == np.float32 and vectors.shape == (len(TEXTS), embedder.dim)
    np.testing.assert_allclose(vectors, expected(source), atol=2e-6)


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
@pytest.mark.parametrize("normalize", [True, False])
def test_pooling_is_the_checkpoints(tmp_path: Path, pooling: str, normalize: bool) -> None:
    source, folder = package(tmp_path, "fp32", pooling=pooling, normalize=normalize)
    with Embedder.load(folder) as embedder:
        assert (embedder.pooling, embedder.normalized) == (pooling, normalize)
        vectors = embedder.embed(TEXTS)
    np.testing.assert_allclose(vectors, expected(source, pooling, normalize), atol=1e-5)


@pytest.mark.parametrize("activation", ["gelu_new", "relu"])
def test_activations(tmp_path: Path, activation: str) -> None:
    source, folder = package(tmp_path, "fp32", hidden_act=activation)
    with Embedder.load(folder) as embedder:
        np.testing.assert_allclose(embedder.embed(TEXTS), expected(source), atol=2e-6)


@pytest.mark.parametrize("precision", ["w8a8_row", "w8a8_block"])
def test_int8_is_near_the_reference(tmp_path: Path, precision: str) -> None:
    source, folder = package(tmp_path, precision)
    with Embedder.load(folder) as embedder:
        vectors = embedder.embed(TEXTS)
    assert compare_vectors(expected(source).astype(np.float32), vectors).min_cosine > 0.99


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("w8a8_row", 5e-3)])
def test_company_changes_next_to_nothing(
    tmp_path: Path, precision: str, tolerance: float, pooling: str
) -> None:
    """Attention adds in another order where it is padded; rounding to 8 bits amplifies that."""
    _, folder = package(tmp_path, precision, pooling=pooling)
    with Embedder.load(folder) as embedder:
        together = embedder.embed(TEXTS)
        alone = np.concatenate([embedder.embed([text]) for text in TEXTS])
        assert embedder.embed(TEXTS).tobytes() == together.tobytes()
    np.testing.assert_allclose(together, alone, atol=tolerance)


def test_the_slow_twin_gives_the_same(tmp_path: Path) -> None:
    _, folder = package(tmp_path, "fp32")
    with Embedder.load(folder) as embedder:
        vectors = embedder.embed(TEXTS)
    manifest = read_encoder_manifest(folder)
    tokenizer = load_tokenizer(folder, manifest)
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    plain = encode_plainly(folder / manifest.targets[0].file, ids, manifest.pooling)
    np.testing.assert_allclose(vectors, plain, atol=1e-6)


def test_a_prefix_of_the_tensors_is_found(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    source = write_tiny_bert(tmp_path / "source")
    export_encoder(source, tmp_path / "plain", precision="fp32")
    file = source / "model.safetensors"
    tensors = {f"bert.{name}": values for name, values in load_file(file).items()}
    save_file(tensors | {"cls.predictions.bias": np.zeros(128, np.float32)}, file)
    export_encoder(source, tmp_path / "prefixed", precision="fp32")
    with Embedder.load(tmp_path / "plain") as a, Embedder.load(tmp_path / "prefixed") as b:
        assert a.embed(TEXTS).tobytes() == b.embed(TEXTS).tobytes()
