"""Fast sampling equals its slow twin, and draws what the distribution says."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from sampling_samples import AMBIGUOUS, bell, cases, make_sampler

from headrace.runtime.config import GenerationConfig
from headrace.runtime.errors import BackendError, RequestError
from headrace.runtime.sampling import reference
from headrace.runtime.sampling.candidates import Logits, Scratch
from headrace.runtime.sampling.sampler import Sampler, sample_seed, uniform

SHAPES = [(7, 3.0), (64, 1.0), (300, 4.0), (1000, 0.2), (5000, 6.0)]


@settings(max_examples=600)
@given(cases())
def test_fast_equals_slow(
    case: tuple[GenerationConfig, Logits, list[int], list[int], int, int],
) -> None:
    config, logits, prompt, answer, seed, position = case
    sampler = make_sampler(config, logits.size, prompt=prompt, answer=answer, eos=(0,), seed=seed)
    try:
        slow = reference.sample(config, logits, prompt, answer, (0,), seed, position)
    except RequestError:  # in a vocabulary of four, every token may be banned
        with pytest.raises(RequestError):
            sampler.sample(logits.copy(), position)
        return
    token, _, _ = sampler.sample(logits.copy(), position)
    if slow.margin < AMBIGUOUS:
        event("ambiguous: within 1e-6 of a boundary")
    else:
        assert token == slow.token_id


@pytest.mark.parametrize(("vocab_size", "scale"), SHAPES)
@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.95},
        {"temperature": 1.5, "top_p": 0.5, "min_p": 0.01},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.02},
        {"temperature": 1.0, "top_p": 0.9999},
    ],
    ids=str,
)
def test_fast_equals_slow_over_many_draws(
    values: dict[str, Any], vocab_size: int, scale: float
) -> None:
    """Every draw is equal but the ambiguous ones, which are few and listed."""
    config = GenerationConfig(**values)
    logits = bell(vocab_size, scale, 1)
    ids, probabilities, bound_margin = reference.kept_tokens(config, logits.tolist())
    ends = np.cumsum(probabilities)
    sampler = make_sampler(config, vocab_size, seed=5)
    ambiguous = []
    for position in range(300):
        u = uniform(5, position)
        expected = ids[min(int(np.searchsorted(ends, u, side="right")), len(ids) - 1)]
        token, _, _ = sampler.sample(logits.copy(), position)
        if min(bound_margin, np.abs(ends - u).min()) < AMBIGUOUS and len(ids) > 1:
            ambiguous.append((position, expected, token))
        else:
            assert token == expected
    assert len(ambiguous) <= 3 or bound_margin < AMBIGUOUS, ambiguous


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.95},
        {"temperature": 1.2, "top_k": 5},
        {"temperature": 1.0, "min_p": 0.1},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(values: dict[str, Any]) -> None:
    config = GenerationConfig(**values)
    logits = bell(50, 1.5, 3)
    ids, probabilities, _ = reference.kept_tokens(config, logits.tolist())
    draws = 20_000
    sampler = make_sampler(config, 50, seed=11)
    counts = Counter(sampler.sample(logits.copy(), p)[0] for p in range(draws))
    assert set(counts) <= set(ids)
    # Tokens expected fewer than five times are pooled, as chi-square asks for.
    observed, expected = [0.0], [0.0]
    for token, probability in zip(ids, probabilities, strict=True):
        if probability * draws < 5:
            observed[0] += counts[token]
            expected[0] += probability * draws
        else:
            observed.append(counts[token])
            expected.append(probability * draws)
    cells = [(o, e) for o, e in zip(observed, expected, strict=True) if e > 0]
    chi_square = sum((o - e) ** 2 / e for o, e in cells)
    freedom = len(cells) - 1
    # Wilson-Hilferty bound at 4 standard deviations; the seed is fixed, so this never flakes.
    bound = freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < bound


@pytest.mark.parametrize("vector", [False, True])
def test_both_exponentials_draw_the_same(vector: bool) -> None:
    """The kernel is chosen by machine; the tokens may not show it."""
    config = GenerationConfig(temperature=0.8, top_p=0.95)
    logits = bell(3000, 3, 6)
    ids, probabilities, _ = reference.kept_tokens(config, logits.tolist())
    ends = np.cumsum(probabilities)
    scratch = Scratch(3000)
    scratch.exp = np.exp2 if vector else np.exp
    scratch.exponent_unit = 1 / math.log(2) if vector else 1.0
    sampler = Sampler(config, [0], (), 1, scratch)
    for position in range(200):
        u = uniform(1, position)
        if np.abs(ends - u).min() > AMBIGUOUS:
            expected = ids[int(np.searchsorted(ends, u, side="right"))]
            assert sampler.sample(logits.copy(), position)[0] == expected


def test_uniform_numbers_are_uniform_and_keyed() -> None:
    by_position = np.array([uniform(1, p) for p in range(20_000)])
    by_seed = np.array([uniform(s, 1) for s in range(20_000)])
    for values in (by_position, by_seed):
        assert values.min() >= 0 and values.max() < 1
        counts, _ = np.histogram(values, 100, (0, 1))
        assert ((counts - 200.0) ** 2 / 200).sum() < 160  # 99 degrees of freedom, 4 sigma
        assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.03
    assert uniform(1, 2) != uniform(2, 1)
    assert uniform(2**64 - 1, 2**40) == uniform(2**64 - 1, 2**40)


def test_uniform_is_pinned() -> None:
    """Stored seeds keep their texts: these values must not change between versions."""
    assert uniform(0, 0).hex() == PINNED[0]
    assert uniform(42, 1000).hex() == PINNED[1]
    assert sample_seed(42, 0) == 42
    assert sample_seed(42, 1) == int(PINNED[2], 16)


PINNED = ("0x1.c4415072f63b9p-1", "0x1.b021712762231p-1", "0x57e1faba65107204")


def test_answers_of_one_request_have_different_seeds() -> None:
    seeds = {sample_seed(seed, index) for seed in range(50) for index in range(128)}
    assert len(seeds) == 50 * 128


@pytest.mark.parametrize("values", [{}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1}])
def test_sample_changes_no_state(values: dict[str, Any]) -> None:
    """A row and a position give one token, however often and in whatever order they are asked."""
    config = GenerationConfig(**values, repetition_penalty=1.3, frequency_penalty=0.5)
    rows = [bell(500, 3, seed) for seed in range(20)]
    first = make_sampler(config, 500, answer=[1, 2], seed=9)
    forward = [first.sample(row.copy(), i)[0] for i, row in enumerate(rows)]
    backward = [first.sample(row.copy(), i)[0] for i, row in reversed(list(enumerate(rows)))]
    assert forward == backward[::-1]


def test_two_sequences_share_scratch_without_disturbing_each_other() -> None:
    scratch = Scratch(500)
    config = GenerationConfig(temperature=0.9, top_p=0.9, presence_penalty=0.5)
    together = [Sampler(config, [1], (), seed, scratch) for seed in (1, 2)]
    alone = [Sampler(config, [1], (), seed, Scratch(500)) for seed in (1, 2)]
    for position in range(50):
        logits = bell(500, 2, position)
        for left, right in zip(together, alone, strict=True):
            token = left.sample(logits.copy(), position)[0]
            assert token == right.sample(logits.copy(), position)[0]
            left.accept(token)
            right.accept(token)


def test_greedy_takes_the_first_of_equals() -> None:
    logits = np.array([1, 7, 7, 3], np.float32)
    assert make_sampler(GenerationConfig(), 4).sample(logits, 0)[0] == 1
    assert make_sampler(GenerationConfig(temperature=1e-6), 4).sample(logits, 0)[0] == 1


def test_presence_and_frequency_count_the_answer_only() -> None:
    config = GenerationConfig(presence_penalty=1.0, frequency_penalty=0.25)
    logits = np.array([5, 4.9, 0, 0], np.float32)
    assert make_sampler(config, 4, prompt=[0, 0]).sample(logits.copy(), 0)[0] == 0
    assert make_sampler(config, 4, answer=[0]).sample(logits.copy(), 0)[0] == 1


def test_repetition_counts_the_prompt_too() -> None:
    config = GenerationConfig(repetition_penalty=2.0)
    logits = np.array([5, 4, -1, -3], np.float32)
    assert make_sampler(config, 4, prompt=[0]).sample(logits.copy(), 0)[0] == 1
    negative = np.array([-1, -1.5, -9, -9], np.float32)
    assert make_sampler(config, 4, prompt=[0]).sample(negative, 0)[0] == 1


def test_penalties_follow_a_long_answer() -> None:
    config = GenerationConfig(repetition_penalty=1.1, frequency_penalty=0.1)
    answer = [int(t) for t in np.random.default_rng(0).integers(0, 900, 1000)]
    logits = bell(1000, 5, 4)
    sampler = make_sampler(config, 1000, prompt=list(range(100)), answer=answer)
    slow = reference.sample(config, logits, range(100), answer, (), 0, 0)
    assert sampler.sample(logits.copy(), 0)[0] == slow.token_id


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_tokens_wait_for_min_new_tokens(ignore_eos: bool) -> None:
    config = GenerationConfig(min_new_tokens=2, stop_token_ids=(3,), ignore_eos=ignore_eos)
    sampler = make_sampler(config, 5, eos=(4,))
    logits = np.array([0, 1, 2, 8, 9], np.float32)
    drawn = []
    for position in range(3):
        drawn.append(sampler.sample(logits.copy(), position)[0])
        sampler.accept(drawn[-1])
    assert drawn == [2, 2, 4]
    assert sampler.is_stop_token(3, 3)
    assert sampler.is_stop_token(4, 3) is not ignore_eos
    assert not sampler.is_stop_token(3, 1)
    assert not sampler.is_stop_token(2, 3)


@pytest.mark.parametrize("values", [{}, {"temperature": 0.8, "top_p": 0.9}, {"top_k": 3}])
def test_logprobs_are_of_the_model(values: dict[str, Any]) -> None:
    """Whatever the parameters do, probabilities are those of the logits as they came."""
    config = GenerationConfig(**values, logprobs=5, logit_bias={17: 50}, repetition_penalty=1.5)
    logits = bell(300, 4, 8)
    expected = reference.log_probabilities(logits)
    token, logprob, top = make_sampler(config, 300, prompt=[3]).sample(logits.copy(), 0)
    assert token == 17
    assert logprob == pytest.approx(expected[17], abs=1e-5)
    order = sorted(range(300), key=lambda i: (-logits[i], i))[:5]
    assert [alternative.token_id for alternative in top] == order
    for alternative in top:
        assert alternative.logprob == pytest.approx(expected[alternative.token_id], abs=1e-5)


def test_logprobs_zero_is_the_token_alone() -> None:
    config = GenerationConfig(logprobs=0)
    token, logprob, top = make_sampler(config, 4).sample(np.zeros(4, np.float32), 0)
    assert (token, top) == (0, ())
    assert logprob == pytest.approx(-math.log(4), abs=1e-6)
    assert make_sampler(GenerationConfig(), 4).sample(np.zeros(4, np.float32), 0) == (0, None, ())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("values", [{}, {"temperature": 1.0}, {"logprobs": 2}], ids=str)
def test_a_broken_model_is_an_error(values: dict[str, Any], bad: float) -> None:
    logits = np.zeros(300, np.float32)
    logits[299] = bad
    with pytest.raises(BackendError, match="NaN" if math.isnan(bad) else "infinite"):
        make_sampler(GenerationConfig(**values), 300).sample(logits, 0)


def test_a_ban_does_not_hide_a_nan() -> None:
    logits = np.array([0, math.nan], np.float32)
    config = GenerationConfig(logit_bias={1: -math.inf}, min_new_tokens=1, stop_token_ids=(1,))
    with pytest.raises(BackendError, match="NaN"):
        make_sampler(config, 2).sample(logits, 0)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_no_temperature_revives_a_banned_token(top_p: float) -> None:
    """The inverse of this one is zero in float32."""
    config = GenerationConfig(temperature=1e308, top_p=top_p, logit_bias={0: -math.inf})
    sampler = make_sampler(config, 300)
    drawn = {sampler.sample(bell(300, 3.0, 0), position)[0] for position in range(3000)}
    assert 0 not in drawn and len(drawn) > 250


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banning_everything_is_the_requests_error(temperature: float) -> None:
    config = GenerationConfig(
        temperature=temperature, logit_bias=dict.fromkeys(range(3), -math.inf)
    )
    with pytest.raises(RequestError, match="no token to draw"):
        make_sampler(config, 3).sample(np.zeros(3, np.float32), 0)
    with pytest.raises(BackendError, match="probability of zero"):
        make_sampler(GenerationConfig(), 3).sample(np.full(3, -math.inf, np.float32), 0)


@settings(max_examples=200)
@given(st.integers(0, 2**64 - 1), st.integers(1, 8), st.floats(0.01, 1.0))
def test_banned_tokens_are_never_drawn(seed: int, top_k: int, top_p: float) -> None:
    config = GenerationConfig(
        temperature=1.0, top_k=top_k, top_p=top_p, logit_bias=dict.fromkeys(range(1, 6), -math.inf)
    )
    token, _, _ = make_sampler(config, 8, seed=seed).sample(np.zeros(8, np.float32), 0)
    assert token in (0, 6, 7)


@pytest.mark.parametrize(
    ("values", "name"),
    [({"logit_bias": {9: 1.0}}, "logit_bias"), ({"stop_token_ids": [9]}, "stop_token_ids")],
)
def test_tokens_beyond_the_vocabulary_are_refused(values: dict[str, Any], name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} names token 9"):
        make_sampler(GenerationConfig(**values), 9)


@pytest.mark.parametrize("scale", [8.0, 2.0, 0.1])  # each of the three bounds of the search
def test_the_nucleus_of_a_real_vocabulary(scale: float) -> None:
    logits = bell(49152, scale, 2)
    config = GenerationConfig(temperature=1.0, top_p=0.95)
    order = np.argsort(-logits, kind="stable")
    ends = np.exp(reference.log_probabilities(logits)[order]).cumsum()
    kept = int(np.searchsorted(ends, 0.95)) + 1
    sampler = make_sampler(config, 49152, seed=3)
    for position in range(100):
        target = uniform(3, position) * ends[kept - 1]
        near = np.abs(ends - target).min() < AMBIGUOUS
        token = sampler.sample(logits.copy(), position)[0]
        rank = int(np.searchsorted(ends, target, side="right"))
        assert token == order[rank] or (near and token in order[rank - 1 : rank + 2])
