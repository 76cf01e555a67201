"""Drafting: what is guessed, how many, and that guesses change nothing but the number of steps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from engine_samples import make_engine, run_arrivals
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backends.fake import FakeBackend, LogitsFn, hashed_logits
from headrace.runtime.config import GenerationConfig
from headrace.runtime.core import SampledToken, Sequence
from headrace.runtime.drafting.acceptance import AcceptanceTable, History
from headrace.runtime.drafting.budget import StepCost, draft_lengths
from headrace.runtime.drafting.drafter import Drafter
from headrace.runtime.drafting.ngram import MAX_CANDIDATES, MAX_MATCH_TOKENS, Match, NgramIndex

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def longest_match(tokens: list[int]) -> Match | None:
    """The definition: all candidates in plain loops."""
    for size in (3, 2):
        ends = [e for e in range(size, len(tokens)) if tokens[e - size : e] == tokens[-size:]]
        matches = []
        for end in ends[::-1][:MAX_CANDIDATES]:
            lengths = range(1, min(end, MAX_MATCH_TOKENS) + 1)
            same = [n for n in lengths if tokens[end - n : end] == tokens[len(tokens) - n :]]
            matches.append(Match(end, max(same)))
        if matches:
            return max(matches, key=lambda match: (match.num_tokens, match.end))
    return None


@given(TEXTS)
def test_the_index_finds_the_longest_match(tokens: list[int]) -> None:
    whole, grown = NgramIndex(), NgramIndex()
    whole.extend(tokens)
    for i, token in enumerate(tokens):
        grown.extend([token])
        assert grown.longest_match() == longest_match(tokens[: i + 1])
    assert whole.longest_match() == grown.longest_match()


@given(TEXTS, st.integers(1, 9))
def test_a_continuation_is_what_followed(tokens: list[int], count: int) -> None:
    index = NgramIndex()
    index.extend(tokens)
    match = index.longest_match()
    if match is None:
        return
    text = list(tokens)
    for token in index.continuation(match, count):  # reads its own guesses where it catches up
        assert token == text[match.end + len(text) - len(tokens)]
        text.append(token)


def trained(slope: float) -> StepCost:
    cost = StepCost()
    for _ in range(40):
        for n in (1, 3, 9):
            cost.observe(n, 10.0 + slope * n)
    return cost


def test_step_cost_learns_a_line_and_shrugs_off_a_pause() -> None:
    cost = trained(0.5)
    assert cost(1) == pytest.approx(10.5, rel=0.05)
    assert cost(20) == pytest.approx(20.0, rel=0.1)
    before = cost(4)
    cost.observe(4, 5000.0)
    assert cost(4) < 1.1 * before


def test_step_cost_keeps_a_slope_where_steps_never_vary() -> None:
    cost = StepCost()
    for _ in range(1000):
        cost.observe(1, 8.0)
    assert cost(1) == pytest.approx(8.0)
    assert 8.3 < cost(2) < 9.0


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.floats(0.02, 0.98), st.integers(0, 4)), min_size=1, max_size=3),
    st.floats(0.01, 3.0),
)
def test_draft_lengths_are_the_best_of_all(
    sequences: list[tuple[float, int]], slope: float
) -> None:
    rates, limits = [rate for rate, _ in sequences], [limit for _, limit in sequences]
    cost = trained(slope)

    def speed(lengths: tuple[int, ...]) -> float:
        chances = (r**i for r, n in zip(rates, lengths, strict=True) for i in range(1, n + 1))
        return (len(rates) + sum(chances)) / cost(len(rates) + sum(lengths))

    chances = [[r**i for i in range(1, n + 1)] for r, n in zip(rates, limits, strict=True)]
    chosen = draft_lengths(cost, chances)
    assert all(n <= limit for n, limit in zip(chosen, limits, strict=True))
    best = max(map(speed, itertools.product(*(range(limit + 1) for limit in limits))))
    assert speed(tuple(chosen)) == pytest.approx(best)


def test_rates_follow_what_is_seen_of_a_kind_and_of_a_sequence() -> None:
    table = AcceptanceTable()
    kind = table.own_kind(5, 0.1)
    assert table.own_kind(5, 0.2) is kind and table.own_kind(5, 2.0) is not kind
    start = kind.rate
    kind.add(0, 1)
    assert kind.rate < start
    lucky, unlucky = History(), History()
    for _ in range(10):
        lucky.add(4, 4)
        unlucky.add(0, 1)
    assert unlucky.rate(kind) < kind.rate < lucky.rate(kind) < 1.0


def test_no_more_is_guessed_than_can_be_used() -> None:
    drafter = Drafter(8)
    for _ in range(50):  # tokens are free: every draft pays
        drafter.observe_step(1, 1.0)
        drafter.observe_step(9, 1.0)
    tokens = [1, 2, 3] * 6
    for left in range(1, 12):
        sequence = Sequence(left, list(tokens), 3, len(tokens) - 3 + left)
        drafts = drafter.propose([sequence])
        assert len(drafts.get(left, ())) == min(left - 1, 8)


def test_a_sequence_above_the_cap_gets_no_drafts() -> None:
    drafter = Drafter(8, batch_entropy_cap_nats=1.2)
    sequences = [Sequence(i, [1, 2, 3] * 4, 12, 50) for i in range(2)]
    assert drafter.propose(sequences).keys() == {0, 1}
    for _ in range(20):
        drafter.observe(0, 0, (SampledToken(1, 2.0),))
        drafter.observe(1, 0, (SampledToken(1, 1.0),))
    assert drafter.propose(sequences).keys() == {1}


def test_drafts_stop_where_none_is_accepted() -> None:
    drafter, offered = Drafter(8), []
    sequence = Sequence(0, [1, 2, 3] * 6, 3, 1000)
    for _ in range(30):
        drafts = drafter.propose([sequence]).get(0, ())
        offered.append(len(drafts))
        drafter.observe(0, len(drafts), (SampledToken(9, 0.01),))
        drafter.observe_step(1 + len(drafts), 10.0 + len(drafts))
    assert offered[0] > 0 and offered[-1] == 0


def repetitive(vocab_size: int, scale: float) -> LogitsFn:
    """Logits that depend on the last token only: such text comes back to itself."""
    logits = hashed_logits(vocab_size, scale)
    return lambda prefix: logits(prefix[-1:])


CONFIGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.05, "frequency_penalty": 0.2},
    {"temperature": 0.7, "seed": 7, "stop": "abc"},
    {"temperature": 0.0, "stop_token_ids": [5, 9], "min_new_tokens": 20},
    {"temperature": 1.0, "seed": 8, "logit_bias": {3: 2.0}, "n": 2},
]


def decode(
    max_draft_tokens: int, arrivals: list[tuple[int, list[int], int]], cancel_at: int | None
) -> tuple[Any, int, int]:
    """Answers to requests that arrive at given steps; one of them is cancelled at some step."""
    backend = FakeBackend(
        vocab_size=64, max_slots=3, kv_budget_tokens=400, logits=repetitive(64, 4.0)
    )
    engine = make_engine(backend, max_draft_tokens=max_draft_tokens, max_chunk_tokens=16)
    configs = [GenerationConfig(max_new_tokens=60, **options) for options in CONFIGS]
    requests = [(step, prompt, configs[kind]) for step, prompt, kind in arrivals]
    results = run_arrivals(engine, requests, cancel_at)
    return results, sum(record.accepted for record in engine.steps), len(engine.steps)


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 40),
            st.lists(st.integers(1, 63), min_size=1, max_size=30),
            st.integers(0, len(CONFIGS) - 1),
        ),
        min_size=1,
        max_size=5,
    ),
    st.none() | st.integers(1, 30),
)
def test_drafts_change_no_answer(
    arrivals: list[tuple[int, list[int], int]], cancel_at: int | None
) -> None:
    plain, none, _ = decode(0, arrivals, cancel_at)
    drafted, _, _ = decode(8, arrivals, cancel_at)
    assert none == 0
    assert drafted == plain


def test_drafts_save_steps_and_carry_their_own_figures() -> None:
    arrivals = [(0, [1, 2, 3], 0), (0, [4, 5], 0)]
    plain, _, many = decode(0, arrivals, None)
    drafted, accepted, few = decode(8, arrivals, None)
    assert drafted == plain and accepted > 20 and few < 0.8 * many


def test_logprobs_and_entropies_are_those_of_plain_decoding() -> None:
    def run(max_draft_tokens: int) -> list[tuple[Any, ...]]:
        backend = FakeBackend(vocab_size=64, logits=repetitive(64, 4.0))
        engine = make_engine(backend, max_draft_tokens=max_draft_tokens)
        config = GenerationConfig(max_new_tokens=80, logprobs=3, ignore_eos=True)
        engine.add(engine.prepare([1, 2, 3], config))
        deltas = []
        while engine.has_work:
            deltas += [event.delta for event in engine.step() if event.delta is not None]
        return [
            (token, entropy, logprob)
            for d in deltas
            for token, entropy, logprob in zip(
                d.token_ids, d.entropy_nats, d.logprobs or (), strict=True
            )
        ]

    assert run(8) == run(0) and len(run(0)) == 80


def test_inexact_backends_draft_only_when_told_to() -> None:
    backend = FakeBackend(vocab_size=64, logits=repetitive(64, 4.0))
    inexact = FakeBackend(vocab_size=64, logits=repetitive(64, 4.0))
    object.__setattr__(inexact.capabilities, "exact_rows", False)
    for used, options, drafts in [
        (backend, {}, True),
        (inexact, {}, False),
        (inexact, {"max_draft_tokens": 4}, True),
    ]:
        used.closed = False
        engine = make_engine(used, **options)
        config = GenerationConfig(max_new_tokens=80, ignore_eos=True)
        engine.add(engine.prepare([1, 2, 3], config))
        while engine.has_work:
            engine.step()
        assert (sum(record.drafted for record in engine.steps) > 0) is drafts
