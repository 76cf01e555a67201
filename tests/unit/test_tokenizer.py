"""Loading, encoding with control tokens from trusted text only, and decoding by bytes."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_samples import (
    KINDS,
    MARKUP,
    SPECIAL,
    byte_level,
    info_of,
    sample,
    sample_library,
    smollm2,
)
from tokenizers import decoders

from headrace.runtime.errors import PackageError, RequestError
from headrace.runtime.tokenizer import Tokenizer

kinds = pytest.mark.parametrize("kind", KINDS)
CONTROL = (*SPECIAL, *MARKUP)
# Text made of whole control tokens, parts of them and other things, so that forgeries are common.
scraps = st.sampled_from(
    [*CONTROL, "<", "<|", "|>", "im_end", "|im_end|>", "<s", ">", " ", "he", "日"]
)
# U+2581 is how SentencePiece writes a space: such a text does not come back.
others = st.text(st.characters(exclude_characters="\u2581", exclude_categories=["Cs"]), max_size=3)
texts = st.lists(scraps | others, max_size=8).map("".join)
plain_texts = texts.filter(lambda text: not re.search("|".join(map(re.escape, CONTROL)), text))


def write(folder: Path, library: tokenizers.Tokenizer) -> Path:
    (folder / "tokenizer.json").write_text(library.to_str(), encoding="utf-8")
    return folder


@kinds
def test_load_checks_the_golden_ids(kind: str, tmp_path: Path) -> None:
    library = KINDS[kind]()
    info = info_of(library)
    tokenizer = Tokenizer.load(write(tmp_path, library), info)
    assert tokenizer.vocab_size == library.get_vocab_size()
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "<|im_end|>")
    golden = dataclasses.replace(info.golden[0], token_ids=(1, 2, 3))
    with pytest.raises(PackageError, match="makes other tokens of 'Hello, world!'"):
        Tokenizer.load(tmp_path, dataclasses.replace(info, golden=(golden,)))


def test_padding_and_truncation_of_the_file_are_ignored(tmp_path: Path) -> None:
    library = byte_level()
    info = info_of(library)
    library.enable_padding(length=128)
    library.enable_truncation(2)
    tokenizer = Tokenizer.load(write(tmp_path, library), info)
    assert tokenizer.encode_prompt("hello") == byte_level().encode("hello").ids


@pytest.mark.parametrize("content", ["", "{}", "[1]", "\x00", '{"model": 3}'])
def test_a_damaged_file_is_a_package_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(PackageError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path, info_of(byte_level()))


def test_a_missing_file_is_a_package_error(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path, info_of(byte_level()))


def test_an_unknown_decoder_is_refused(tmp_path: Path) -> None:
    library = byte_level()
    library.decoder = decoders.WordPiece()
    with pytest.raises(PackageError, match="decodes with WordPiece is not supported"):
        Tokenizer.load(write(tmp_path, library), info_of(library))


@pytest.mark.parametrize("prompt", ["hello", "<s>hello"])
def test_bos_comes_once(prompt: str) -> None:
    library = byte_level()
    ids = Tokenizer(library, info_of(library, add_bos=True)).encode_prompt(prompt)
    assert ids == library.encode("<s>hello").ids


def test_raw_prompts_may_hold_control_tokens() -> None:
    assert sample("byte_level").encode_prompt("<|im_end|>") == [
        byte_level().token_to_id("<|im_end|>")
    ]


@pytest.mark.parametrize(
    ("prompt", "reason"), [("", "empty"), ("\ud800", "surrogates"), (3, "int")]
)
def test_bad_prompts_are_refused(prompt: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        sample("byte_level").encode_prompt(prompt)


segment_lists = st.lists(st.tuples(texts, st.booleans()), max_size=6)


@kinds
@settings(max_examples=300)
@given(segments=segment_lists)
def test_untrusted_text_never_makes_a_control_token(
    kind: str, segments: list[tuple[str, bool]]
) -> None:
    """Of all control tokens in the ids, each lies whole within trusted text; no text is lost."""
    tokenizer = sample(kind)
    library = sample_library(kind)
    control = {library.token_to_id(token): token for token in CONTROL}
    ids = tokenizer.encode_segments(segments)
    trusted = [""]
    for text, is_trusted in segments:
        if is_trusted:
            trusted[-1] += text
        elif text:
            trusted.append("")
    for token in CONTROL:
        made = sum(control.get(i) == token for i in ids)
        assert made <= sum(text.count(token) for text in trusted)
    shown = library.decode(ids, skip_special_tokens=False).replace(" ", "")
    assert shown == "".join(text for text, _ in segments).replace(" ", "")


@kinds
@settings(max_examples=200)
@given(trusted=texts, untrusted=plain_texts, rest=st.just("<|im_end|>"))
def test_harmless_text_is_encoded_as_a_whole(
    kind: str, trusted: str, untrusted: str, rest: str
) -> None:
    """Segments cost nothing: merges across them are those of the joined text."""
    segments = [(trusted, True), (untrusted, False), (rest, True)]
    whole = trusted + untrusted + rest
    spans = [m.span() for m in re.finditer("|".join(map(re.escape, CONTROL)), whole)]
    begin, end = len(trusted), len(trusted) + len(untrusted)
    if any(left < end and right > begin for left, right in spans):
        return  # the seam makes a control token: the other test's case
    assert sample(kind).encode_segments(segments) == sample_library(kind).encode(whole).ids


def test_a_forged_token_is_spelled_out() -> None:
    tokenizer = sample("byte_level")
    forged = tokenizer.encode_segments([("a", True), ("<|im_end|>", False)])
    assert len(forged) > 5
    assert tokenizer.decode(forged) == "a<|im_end|>"


@kinds
@settings(max_examples=200)
@given(text=plain_texts)
def test_decode_gives_the_text_back(kind: str, text: str) -> None:
    tokenizer, library = sample(kind), sample_library(kind)
    ids = library.encode(text).ids
    assert tokenizer.decode(ids) == text == library.decode(ids)


@settings(max_examples=300)
@given(ids=st.lists(st.integers(0, 275), max_size=20))
def test_decode_equals_the_librarys_for_any_bytes(ids: list[int]) -> None:
    assert sample("byte_level").decode(ids) == sample_library("byte_level").decode(ids)


def test_the_space_at_the_start_belongs_to_an_answer() -> None:
    tokenizer = sample("sentencepiece")
    ids = tokenizer.encode_prompt("he")
    assert tokenizer.decode(ids) == "he"
    assert tokenizer.decode(ids, at_start=False) == " he"


def test_tokens_beyond_the_vocabulary_are_not_shown() -> None:
    assert sample("byte_level").decode([10**6]) == ""


@pytest.mark.model
def test_smollm2_round_trip() -> None:
    tokenizer, _ = smollm2()
    assert tokenizer.vocab_size == 49152
    text = "Grüße, 日本語 👩‍👩‍👧 and\n\n  code: x += 1\ttab"
    assert tokenizer.decode(tokenizer.encode_prompt(text)) == text
