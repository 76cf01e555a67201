"""Drafts from other answers: what the pool finds, what it forgets, and that it changes no text."""

from __future__ import annotations

from typing import Any

import pytest
from engine_samples import Answers, make_engine, run_arrivals, run_to_end
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backends.fake import FakeBackend, LogitsFn, hashed_logits
from headrace.runtime.config import GenerationConfig
from headrace.runtime.core import SampledToken, Sequence
from headrace.runtime.drafting.drafter import Drafter
from headrace.runtime.drafting.pool import (
    MAX_CANDIDATES,
    MAX_MATCH_TOKENS,
    NGRAM_SIZE,
    NgramPool,
    PoolText,
)

# Which text grows, and by what.
GROWTH = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), min_size=1, max_size=12)), max_size=30
)


class SlowPool:
    """The definition: pieces of text in lists, searched from the end."""

    def __init__(self, capacity_tokens: int, piece_tokens: int) -> None:
        self.capacity_tokens, self.piece_tokens = capacity_tokens, piece_tokens
        self.pieces: dict[int, tuple[int, list[int], int]] = {}  # text, tokens, those not its own
        self.num_pieces = 0
        self.current: dict[int, int] = {}  # piece of a text
        self.tails: dict[int, list[int]] = {}
        self.places: list[tuple[int, int, list[int]]] = []  # piece, offset, n-gram; as they came

    def extend(self, text: int, tokens: list[int]) -> tuple[list[int], int, int] | None:
        """Tokens, end and length of the match."""
        for token in tokens:
            tail = self.tails.setdefault(text, [])
            number = self.current.get(text)
            if number not in self.pieces or self.is_full(number):
                number = self.current[text] = self.num_pieces
                self.num_pieces += 1
                self.pieces[number] = (text, list(tail), len(tail))
            held = self.pieces[number][1]
            held.append(token)
            tail[:] = [*tail, token][-MAX_MATCH_TOKENS:]
            self.places.append((number, len(held) - 1, held[-NGRAM_SIZE:]))
        found = self.search(text)
        while len(self) > self.capacity_tokens:
            del self.pieces[min(self.pieces)]
        return found

    def is_full(self, number: int | None) -> bool:
        assert number is not None
        _, tokens, num_context = self.pieces[number]
        return len(tokens) - num_context == self.piece_tokens

    def search(self, text: int) -> tuple[list[int], int, int] | None:
        *before, (number, _, wanted) = self.places
        own, found = self.pieces[number][1], []
        same = [place for place in before if place[2] == wanted and len(wanted) == NGRAM_SIZE]
        for piece, offset, _ in same[::-1][:MAX_CANDIDATES]:
            if piece not in self.pieces:
                break
            owner, tokens, _ = self.pieces[piece]
            end = offset + 1
            lengths = range(1, min(end, len(own), MAX_MATCH_TOKENS) + 1)
            length = max(n for n in lengths if tokens[end - n : end] == own[len(own) - n :])
            if owner != text and tokens[end:]:
                found.append((tokens, end, length))
        return max(found, key=lambda match: match[2], default=None)  # the first of the longest

    def __len__(self) -> int:
        return sum(len(tokens) for _, tokens, _ in self.pieces.values())


@settings(max_examples=200)
@given(GROWTH, st.integers(1, 100), st.integers(1, 20))
def test_the_pool_finds_what_a_search_finds(
    growth: list[tuple[int, list[int]]], capacity: int, piece: int
) -> None:
    fast, slow = NgramPool(capacity, piece), SlowPool(capacity, piece)
    texts = [PoolText() for _ in range(3)]
    for number, tokens in growth:
        text = texts[number]
        fast.extend(text, tokens)
        assert text.match == slow.extend(number, tokens)
        assert len(fast) == len(slow) <= capacity
        assert len(fast._latest) <= len(fast)
        if text.match is not None:
            behind = tuple(text.match.tokens[text.match.end :])
            assert behind and text.match.continuation(3) == behind[:3]
    for number, text in enumerate(texts):
        assert text.num_tokens == sum(len(tokens) for n, tokens in growth if n == number)


def test_distinct_n_grams_with_one_key_are_told_apart() -> None:
    pool, first, second = NgramPool(100), PoolText(), PoolText()
    pool.extend(first, [0, 1 << 15, 2, 3, 4])
    pool.extend(second, [1, 0, 2, 3])
    assert len(pool._latest) == 2 and second.match is None


def ended(drafter: Drafter, seq_id: int, tokens: list[int], prompt_len: int) -> None:
    sequence = Sequence(seq_id, tokens, prompt_len, 100)
    drafter.propose([sequence])
    drafter.forget(sequence)


def test_another_answer_is_drafted_from_where_the_own_text_has_nothing() -> None:
    answer = list(range(10, 30))
    sequence = Sequence(1, [3, 2, 1, *answer[:6]], 3, 100)
    for pool_tokens, drafts in [(0, {}), (1000, {1: tuple(answer[6:8])})]:
        drafter = Drafter(2, pool_tokens=pool_tokens)
        ended(drafter, 0, [1, 2, 3, *answer], 3)
        assert drafter.propose([sequence]) == drafts


def test_the_last_tokens_of_an_answer_reach_the_pool() -> None:
    drafter, answer = Drafter(8, pool_tokens=1000), list(range(10, 30))
    first = Sequence(0, [1, *answer[:2]], 1, 100)
    drafter.propose([first])
    first.tokens += answer[2:]  # by its last step
    drafter.forget(first)
    assert drafter.propose([Sequence(1, [2, *answer[:10]], 1, 100)])[1][0] == answer[10]


def test_prompts_are_not_pooled_but_for_their_end() -> None:
    drafter, prompt = Drafter(8, pool_tokens=1000), list(range(100, 200))
    ended(drafter, 0, [*prompt, 1, 2], 100)
    assert drafter.propose([Sequence(1, [7, *prompt[:50]], 1, 100)]) == {}


def test_the_own_text_goes_first_until_the_pool_is_known_to_be_better() -> None:
    drafter = Drafter(1, pool_tokens=1000)
    ended(drafter, 0, [9, 1, 2, 3, 4, 60], 1)
    sequence = Sequence(1, [7, 1, 2, 3, 4, 50, 8, 1, 2, 3, 4], 1, 100)
    assert drafter.propose([sequence]) == {1: (50,)}
    for _ in range(8):
        drafter.observe(1, 1, (SampledToken(60, 0.0),))  # not what the own text said
        drafter.propose([sequence])
    assert drafter.propose([sequence]) == {1: (60,)}


def repetitive(vocab_size: int, scale: float) -> LogitsFn:
    """Logits that depend on the last three tokens: texts meet, and go on alike."""
    logits = hashed_logits(vocab_size, scale)
    return lambda prefix: logits(prefix[-3:])


CONFIGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.8, "top_p": 0.95, "seed": 5},
    {"temperature": 0.0, "stop_token_ids": [5, 9], "n": 2},
]


def decode(
    arrivals: list[tuple[int, list[int], int]], cancel_at: int | None, **options: Any
) -> tuple[list[Any], int]:
    """Answers to requests that arrive at given steps, and how many drafts were accepted."""
    backend = FakeBackend(max_slots=3, kv_budget_tokens=300, logits=repetitive(64, 6.0))
    engine = make_engine(backend, max_chunk_tokens=16, **options)
    configs = [GenerationConfig(max_new_tokens=60, **options) for options in CONFIGS]
    requests = [(step, prompt, configs[kind]) for step, prompt, kind in arrivals]
    results = run_arrivals(engine, requests, cancel_at)
    return results, sum(record.accepted for record in engine.steps)


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 40),
            st.lists(st.integers(1, 4), min_size=1, max_size=20),
            st.integers(0, len(CONFIGS) - 1),
        ),
        min_size=1,
        max_size=6,
    ),
    st.none() | st.integers(1, 30),
    st.sampled_from([1, 30, 4096]),
)
def test_the_pool_changes_no_answer(
    arrivals: list[tuple[int, list[int], int]], cancel_at: int | None, pool_tokens: int
) -> None:
    plain, none = decode(arrivals, cancel_at, max_draft_tokens=0)
    pooled, _ = decode(arrivals, cancel_at, draft_pool_tokens=pool_tokens)
    assert none == 0
    assert pooled == plain


@pytest.mark.parametrize(("pool_tokens", "faster"), [(0, False), (4096, True)])
def test_the_same_question_again_takes_fewer_steps(pool_tokens: int, faster: bool) -> None:
    backend = FakeBackend(logits=hashed_logits(64))  # text that does not repeat itself
    engine, answers = make_engine(backend, draft_pool_tokens=pool_tokens), Answers()
    config = GenerationConfig(max_new_tokens=60, ignore_eos=True)
    requests, steps = [], []
    for _ in range(2):
        requests.append(engine.prepare([1, 2, 3, 4, 5], config))
        engine.add(requests[-1])
        before = len(engine.steps)
        run_to_end(engine, answers)
        steps.append(len(engine.steps) - before)
    assert answers.tokens[requests[0], 0] == answers.tokens[requests[1], 0]
    assert (steps[1] < 0.5 * steps[0]) is faster
