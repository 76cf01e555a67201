"""Tokenizers rebuilt from GGUF metadata, held against the ids that llama.cpp gives."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_samples import CONTROL, TOKENS, TYPES, USER, default_metadata
from smollm2 import require_checkpoint
from tokenizers import Tokenizer

from headrace.exporters.checkpoint.gguf_config import GgufMetadata
from headrace.exporters.checkpoint.gguf_header import Value, read_header
from headrace.exporters.checkpoint.golden import GOLDEN_TEXTS, golden_texts
from headrace.exporters.checkpoint.pretokenizers import PRE_TOKENIZERS
from headrace.exporters.checkpoint.spm_merges import merges_from_scores
from headrace.exporters.checkpoint.tokenizer_gguf import tokenizer_from_metadata
from headrace.exporters.checkpoint.values import TokenizerSource
from headrace.runtime.errors import CheckpointError

IDS_FILE = Path(__file__).parent / "data" / "checkpoint_tokenizer_ids.json"
PREFIX = "tokenizer.ggml."
FAMILIES = ("gpt-2", "smollm", "llama-bpe", "qwen2", "default")


@cache
def stored() -> Any:
    return json.loads(IDS_FILE.read_text(encoding="utf-8"))


@cache
def real_metadata() -> dict[str, Value]:
    return read_header(require_checkpoint()).metadata


def source(metadata: dict[str, Any]) -> TokenizerSource:
    """Lists of numbers become arrays, as the header reader gives them."""
    values = {
        key: np.asarray(value) if isinstance(value, list) and type(value[0]) is not str else value
        for key, value in metadata.items()
        if value is not None
    }
    return tokenizer_from_metadata(GgufMetadata(values, Path("m.gguf")))


def small(**changes: Any) -> TokenizerSource:
    return source(default_metadata() | {PREFIX + key: value for key, value in changes.items()})


def assert_same_ids(tokenizer_json: str, cases: list[Any]) -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json)
    differing = [
        text for text, ids in cases if tokenizer.encode(text, add_special_tokens=False).ids != ids
    ]
    assert len(cases) >= 100 and not differing, f"{len(differing)} differ: {differing[:5]}"


@pytest.mark.model
def test_real_tokenizer_equals_llama_cpp() -> None:
    built = source(real_metadata())
    assert_same_ids(built.tokenizer_json, stored()["smollm"])
    assert (built.bos_token_id, built.eos_token_ids, built.add_bos) == (1, (2, 0), False)
    assert built.chat_template is not None and "<|im_start|>" in built.chat_template


@pytest.mark.parametrize("name", [*FAMILIES, "dbrx", "tekken", "gpt-4o"])
def test_pre_tokenizers_equal_llama_cpp(name: str) -> None:
    assert_same_ids(pair_tokenizer(name).tokenizer_json, stored()["pre"][name])


def test_the_stored_cases_tell_pre_tokenizers_apart() -> None:
    ids = [stored()["pre"][name] for name in FAMILIES]
    assert all(a != b for i, a in enumerate(ids) for b in ids[:i])


def pair_tokenizer(name: str) -> TokenizerSource:
    tokens, merges = stored()["pre"]["tokens"], stored()["pre"]["merges"]
    types = [3, 3, 4] + [1] * (len(tokens) - 3)
    return small(pre=name, tokens=tokens, merges=merges, token_type=types)


@pytest.mark.model
def test_text_comes_back() -> None:
    tokenizer = Tokenizer.from_str(source(real_metadata()).tokenizer_json)
    for text in GOLDEN_TEXTS[:-1]:  # the last has bytes that the vocabulary lacks
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_equals_llama_cpp(prefix: bool) -> None:
    cases = stored()["sentencepiece"][f"prefix_{prefix}".lower()]
    built = sentencepiece(add_space_prefix=prefix)
    assert_same_ids(built.tokenizer_json, cases)
    assert (built.bos_token_id, built.eos_token_ids, built.add_bos) == (1, (2,), True)
    tokenizer = Tokenizer.from_str(built.tokenizer_json)
    for text, ids in cases:
        if "<s>" not in text and "</s>" not in text and "▁" not in text:
            assert tokenizer.decode(ids) == text


def sentencepiece(**changes: Any) -> TokenizerSource:
    vocabulary = stored()["sentencepiece"]
    given = {
        "model": "llama",
        "pre": None,
        "merges": None,
        "tokens": vocabulary["tokens"],
        "token_type": vocabulary["types"],
        "scores": vocabulary["scores"],
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return small(**(given | changes))


def test_merges_from_scores() -> None:
    tokens = ["a", "b", "c", "ab", "bc", "abc"]
    merges = merges_from_scores(tokens, [-9, -8, -7, -2, -3, -1])
    assert merges == [("a", "bc"), ("ab", "c"), ("a", "b"), ("b", "c")]


def test_token_types() -> None:
    tokenizer = Tokenizer.from_str(small().tokenizer_json)
    added = {t.content: t.special for t in tokenizer.get_added_tokens_decoder().values()}
    assert added == {**dict.fromkeys(CONTROL, True), USER: False}
    encoded = tokenizer.encode(f"he{USER}<s>he", add_special_tokens=False)
    assert encoded.tokens == ["he", USER, "<s>", "he"]
    assert tokenizer.decode(encoded.ids) == f"he{USER}he"
    tokenizer.encode_special_tokens = True
    assert "<s>" not in tokenizer.encode("<s>", add_special_tokens=False).tokens


def test_ids_stay_as_stored() -> None:
    tokenizer = Tokenizer.from_str(small().tokenizer_json)
    assert tokenizer.get_vocab_size() == len(TOKENS)
    assert [tokenizer.id_to_token(i) for i in range(len(TOKENS))] == TOKENS


def test_end_tokens() -> None:
    assert small(eos_token_id=0).eos_token_ids == (0, 1)  # "<|im_end|>" by its spelling
    assert small(eot_token_id=5, eom_token_id=1).eos_token_ids == (1, 5)
    ordinary = small(token_type=[1] * len(TYPES))
    added = Tokenizer.from_str(ordinary.tokenizer_json).get_added_tokens_decoder()
    assert [(i, t.special) for i, t in added.items()] == [(1, True)]


@pytest.mark.parametrize(
    ("changes", "add_bos"),
    [
        ({}, False),
        ({"add_bos_token": True}, True),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
    ],
)
def test_add_bos(changes: dict[str, Any], add_bos: bool) -> None:
    assert small(**changes).add_bos is add_bos


def test_suggested_sampling() -> None:
    metadata = default_metadata() | {
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
        "general.sampling.penalty_repeat": 1.1,
    }
    assert source(metadata).generation_config == {
        "bos_token_id": 0,
        "eos_token_id": [1],
        "temperature": 0.5,
        "top_k": 20,
        "repetition_penalty": 1.1,
    }


def test_missing_pre_tokenizer_name_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert small(pre=None).tokenizer_json == small(pre="default").tokenizer_json
    assert "does not name its pre-tokenizer" in caplog.text


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_can_be_built(name: str) -> None:
    tokenizer = Tokenizer.from_str(small(pre=name).tokenizer_json)
    text = "Hello 1234, it's\n\n  \tHELLO wörld\U0001f9ff!"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": None}, r"no tokenizer \(metadata key 'tokenizer\.ggml\.model'\)"),
        ({"model": "t5"}, "tokenizer of kind 't5'"),
        ({"pre": "brand-new"}, "pre-tokenizer 'brand-new', which is not known"),
        ({"tokens": None}, r"'tokenizer\.ggml\.tokens'"),
        ({"tokens": ["a", "b", "a"]}, "token 'a' twice"),
        ({"tokens": ["a"]}, "1 tokens, but"),
        ({"token_type": [1, 2]}, "2 token types"),
        ({"merges": None}, r"'tokenizer\.ggml\.merges'"),
        ({"merges": ["h nowhere"]}, "do not fit together"),
        ({"merges": ["he"]}, "do not fit together"),
        ({"eos_token_id": 10_000}, "eos_token_id is 10000"),
        ({"add_bos_token": True, "bos_token_id": None}, "bos_token_id"),
        ({"add_eos_token": True}, "ends every text"),
    ],
)
def test_unusable_tokenizers(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected):
        small(**changes)


def test_sentencepiece_needs_scores() -> None:
    with pytest.raises(CheckpointError, match="scores"):
        sentencepiece(scores=None)


def test_empty_tokens_get_names() -> None:
    tokens = [*TOKENS[:-2], "", TOKENS[-1]]
    built = Tokenizer.from_str(small(tokens=tokens).tokenizer_json)
    assert built.id_to_token(len(tokens) - 2) == f"[EMPTY_{len(tokens) - 2}]"


def test_golden_texts() -> None:
    tokenizer = Tokenizer.from_str(small().tokenizer_json)
    golden = golden_texts(tokenizer)
    assert len(golden) >= 12
    assert golden[0].token_ids == tuple(
        tokenizer.encode(golden[0].text, add_special_tokens=False).ids
    )
