"""all-MiniLM-L6-v2 against sentence-transformers' vectors, and the command on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from minilm import golden_texts, golden_vectors, require_minilm

from headrace.exporters import cli as export_cli
from headrace.runtime import Embedder, cli

pytestmark = pytest.mark.model
LEAST_COSINE = {"fp32": 0.99999, "w8a8_row": 0.99}


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`make(precision)` by the command, remembered."""
    made: dict[str, Path] = {}

    def make(precision: str) -> Path:
        if precision not in made:
            folder = tmp_path_factory.mktemp("minilm") / precision
            source = str(require_minilm())
            assert export_cli.main([source, "-o", str(folder), "-p", precision, "-q"]) == 0
            made[precision] = folder
        return made[precision]

    return make


@pytest.mark.parametrize("precision", LEAST_COSINE)
def test_vectors_are_sentence_transformers(minilm: Callable[[str], Path], precision: str) -> None:
    with Embedder.load(minilm(precision)) as embedder:
        assert (embedder.max_tokens, embedder.pooling, embedder.normalized) == (256, "mean", True)
        vectors = embedder.embed(golden_texts(), truncate=True)
        alone = np.concatenate([embedder.embed([t], truncate=True) for t in golden_texts()])
    cosines = (vectors * golden_vectors()).sum(axis=1)
    assert cosines.min() >= LEAST_COSINE[precision], cosines
    # Attention pads to the longest text of a call, which moves sums by a last bit; rounding to
    # 8 bits amplifies that.
    np.testing.assert_allclose(vectors, alone, atol=1e-6 if precision == "fp32" else 5e-3)


def test_int8_takes_less_than_a_third(minilm: Callable[[str], Path]) -> None:
    sizes = {
        precision: sum(f.stat().st_size for f in minilm(precision).rglob("weights.bin"))
        for precision in LEAST_COSINE
    }
    assert sizes["w8a8_row"] < sizes["fp32"] / 3


def test_the_package_says_what_was_measured(minilm: Callable[[str], Path]) -> None:
    report = json.loads((minilm("w8a8_row") / "precision_report.json").read_text("utf-8"))
    assert report["joint"]["min_cosine"] > 0.99


def test_the_command_ranks_the_answer_first(
    minilm: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    question, answer = golden_texts()[1:3]
    texts = [question, golden_texts()[3], answer, golden_texts()[0]]
    assert cli.main(["embed", str(minilm("w8a8_row")), *texts]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    vectors = np.array([line["embedding"] for line in lines])
    assert int((vectors[1:] @ vectors[0]).argmax()) == 1
    assert not any(line["truncated"] for line in lines)
