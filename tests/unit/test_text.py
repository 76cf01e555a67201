"""Streamed text: independent of how tokens are grouped, whole characters, no stop string leaks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizer_samples import KINDS, sample, sample_library, smollm2

from headrace.runtime.text import StopMatcher, TextStream
from headrace.runtime.tokenizer import Tokenizer

kinds = pytest.mark.parametrize("kind", KINDS)
# Few letters, so that stop strings overlap themselves, each other and the text.
letters = st.text(st.sampled_from("ab�"), min_size=1, max_size=5)
stops = st.lists(letters, max_size=3)


def first_stop(text: str, stop: list[str]) -> tuple[str, str] | None:
    """Slow twin: text before the stop string that ends first (the longest there), and it."""
    for end in range(1, len(text) + 1):
        if matches := [s for s in stop if text[:end].endswith(s)]:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return None


def in_chunks(items: list[int], sizes: list[int]) -> list[list[int]]:
    """`items` cut into pieces of these sizes, then the rest in pieces of one."""
    iterator = iter(items)
    chunks = [list(itertools.islice(iterator, size)) for size in sizes]
    return chunks + [[item] for item in iterator]


def run(stream: TextStream, chunks: list[list[int]]) -> list[str]:
    return [*(stream.push(chunk) for chunk in chunks), stream.finish()]


@settings(max_examples=500)
@given(pieces=st.lists(letters | st.just(""), max_size=8), stop=stops)
@example(pieces=["ab", "aab"], stop=["abab", "aab"])  # falls back within a match
@example(pieces=["aba"], stop=["b", "aba"])  # "b" ends first, though "aba" began before
def test_matcher_equals_its_slow_twin(pieces: list[str], stop: list[str]) -> None:
    matcher = StopMatcher(stop)
    emitted = ""
    for i, piece in enumerate(pieces):
        emitted += matcher.push(piece)
        so_far = "".join(pieces[: i + 1])
        if first_stop(so_far, stop) is None:
            # Withheld is the longest end that begins a stop string, and no more.
            held = so_far[len(emitted) :]
            ends = [so_far[k:] for k in range(len(so_far) + 1)]
            assert held == next(e for e in ends if any(s.startswith(e) for s in stop) or not e)
    emitted += matcher.finish()
    expected = first_stop("".join(pieces), stop)
    assert (emitted, matcher.matched) == (expected or ("".join(pieces), None))


@kinds
@settings(max_examples=300)
@given(data=st.data(), stop=stops, include=st.booleans())
def test_chunks_do_not_matter(
    kind: str, data: st.DataObject, stop: list[str], include: bool
) -> None:
    """Any grouping of any ids gives decode(ids), cut at the stop string."""
    tokenizer = sample(kind)
    ordinary = tokenizer.encode_prompt("ab")
    token = st.integers(0, tokenizer.vocab_size - 1) | st.sampled_from(ordinary)
    ids = data.draw(st.lists(token, max_size=20))
    stream = TextStream(tokenizer, stop, include)
    texts = run(stream, in_chunks(ids, data.draw(st.lists(st.integers(0, 5), max_size=4))))
    whole = tokenizer.decode(ids, at_start=False)
    expected = first_stop(whole, stop)
    before, matched = expected or (whole, None)
    assert "".join(texts) == before + (matched if matched and include else "")
    assert stream.stopped == matched


@kinds
@settings(max_examples=200)
@given(text=st.text(st.characters(exclude_characters="\u2581\ufffd", exclude_categories=["Cs"])))
def test_no_half_characters(kind: str, text: str) -> None:
    """One token at a time, whole text never shows a replacement character."""
    ids = sample_library(kind).encode(text).ids
    texts = run(TextStream(sample(kind), (), False), in_chunks(ids, []))
    assert not any("\ufffd" in piece for piece in texts)
    assert "".join(texts) == sample(kind).decode(ids, at_start=False)


@kinds
def test_an_unfinished_character_is_not_lost(kind: str) -> None:
    ids = sample_library(kind).encode("ok 😺").ids[:-1]
    stream = TextStream(sample(kind), (), False)
    texts = [stream.push([i]) for i in ids]
    assert "".join(texts).strip() == "ok"
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def stream_of(text: str, stop: tuple[str, ...], *, include: bool = False) -> tuple[list[str], str]:
    """The text pushed one byte a token; what came out, and the end."""
    stream = TextStream(sample("byte_level"), stop, include)
    ids = [sample_library("byte_level").encode(c).ids for c in text]
    return [stream.push(i) for i in ids], stream.finish()


def test_the_beginning_of_a_stop_string_is_withheld() -> None:
    texts, end = stream_of("xEND", ("END",))
    assert (texts, end) == (["x", "", "", ""], "")


def test_what_was_withheld_comes_when_it_was_no_stop() -> None:
    texts, end = stream_of("xENE.", ("END",))
    assert (texts, end) == (["x", "", "", "EN", "E."], "")
    assert stream_of("xEN", ("END",))[1] == "EN"


def test_the_matched_stop_string_can_be_shown() -> None:
    texts, end = stream_of("xENDy", ("END",), include=True)
    assert (texts, end) == (["x", "", "", "END", ""], "")


def test_a_stop_string_of_many_bytes() -> None:
    texts, end = stream_of("a日本b", ("日本",))
    assert ("".join(texts), end) == ("a", "")


def test_special_tokens_are_not_shown() -> None:
    tokenizer: Tokenizer = sample("byte_level")
    ids = tokenizer.encode_prompt("a<|im_end|><tool_call>b")
    assert "".join(run(TextStream(tokenizer, (), False), [ids])) == "a<tool_call>b"


@pytest.mark.model
def test_smollm2_streams_what_it_decodes() -> None:
    tokenizer, _ = smollm2()
    text = "Here is 日本語, 👩‍👩‍👧, naïve\n\nUser: more"
    ids = tokenizer.encode_prompt(text)
    stream = TextStream(tokenizer, ("\n\nUser:",), False)
    assert "".join(run(stream, in_chunks(ids, []))) == text.partition("\n\nUser:")[0]
    assert stream.stopped == "\n\nUser:"
