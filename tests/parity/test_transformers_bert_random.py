"""Tiny random encoders against transformers and, where it is installed, optimum's export."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_bert import tiny_wordpiece, write_tiny_bert

from headrace.exporters.encoder_package import export_encoder
from headrace.runtime import Embedder

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.torch

TEXTS = ["a short text", "one that is longer, with 3 commas, and a mark!", "x"]


def mean_of_states(source: Path) -> np.ndarray:
    """What transformers makes of each text alone, averaged over its tokens."""
    model = transformers.AutoModel.from_pretrained(source, dtype=torch.float32).eval()
    tokenizer = tiny_wordpiece()
    tokenizer.no_padding()
    tokenizer.no_truncation()
    vectors = []
    for text in TEXTS:
        ids = torch.tensor([tokenizer.encode(text).ids])
        with torch.no_grad():
            vectors.append(model(input_ids=ids).last_hidden_state[0].mean(0).numpy())
    return np.array(vectors)


@pytest.mark.parametrize(
    "model_type", ["bert", "roberta", "xlm-roberta", "camembert", "distilbert"]
)
def test_states_are_those_of_transformers(tmp_path: Path, model_type: str) -> None:
    source = write_tiny_bert(tmp_path / "source", model_type, pooling=None)
    export_encoder(source, tmp_path / "package", precision="fp32")
    with Embedder.load(tmp_path / "package") as embedder:
        np.testing.assert_allclose(embedder.embed(TEXTS), mean_of_states(source), atol=5e-6)


@pytest.mark.parametrize("model_type", ["bert", "distilbert"])
def test_an_export_of_optimum_gives_the_same_package(tmp_path: Path, model_type: str) -> None:
    exporters = pytest.importorskip("optimum.exporters.onnx", reason="optimum is not installed")
    source = write_tiny_bert(tmp_path / "source", model_type, pooling=None)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tiny_wordpiece()).save_pretrained(source)
    exporters.main_export(str(source), str(tmp_path / "onnx"), task="feature-extraction")
    for name in ("source", "onnx"):
        export_encoder(tmp_path / name, tmp_path / f"from_{name}", precision="fp32")
    with Embedder.load(tmp_path / "from_source") as a, Embedder.load(tmp_path / "from_onnx") as b:
        np.testing.assert_allclose(a.embed(TEXTS), b.embed(TEXTS), atol=1e-6)
