"""Draws that the likeliest tokens settle are those of the draw by itself, in any company."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from sampling_samples import bell, make_sampler

from headrace.backends.base import Probabilities
from headrace.backends.fake import hashed_logits
from headrace.runtime.config import GenerationConfig
from headrace.runtime.manifest import PROBABILITY_BLOCK
from headrace.runtime.sampling.candidates import Logits
from headrace.runtime.sampling.likely import LEAST, Wanted, draw_likely, settled
from headrace.runtime.sampling.sampler import Sampler

VOCAB = 700


@st.composite
def rows(draw: st.DrawFn) -> tuple[Logits, Sampler, int]:
    """Logits of a line, flat or steep, with ties or without; whose it is, and the position."""
    logits = bell(VOCAB, draw(st.floats(0.1, 8)), draw(st.integers(0, 2**32)))
    if draw(st.booleans()):  # as likely as one another, or nearly
        steps = draw(st.sampled_from([0.0, 1e-6, 1e-3, 0.5]))
        logits[draw(st.permutations(range(8)))] = logits.max() + steps * np.arange(8)
    logits += np.float32(draw(st.sampled_from([0.0, 30.0, -200.0])))
    config = GenerationConfig(
        temperature=draw(st.floats(0.2, 2.0)),
        top_p=draw(st.one_of(st.sampled_from([0.9, 0.95, 0.0]), st.floats(0.0, 0.9999))),
    )
    sampler = make_sampler(config, VOCAB, seed=draw(st.integers(0, 2**64 - 1)))
    return logits, sampler, draw(st.integers(0, 2**20))


def as_a_graph(logits: Logits, inverse_temperatures: list[float]) -> Probabilities:
    """Probabilities of each line, in float32 and multiplied before the largest is known."""
    scaled = logits * np.array(inverse_temperatures, np.float32)[:, None]
    weights = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    given = Probabilities.empty(*logits.shape)
    given.values[:] = 0
    given.values[:, : logits.shape[1]] = weights / weights.sum(axis=1, keepdims=True)
    blocks = given.values.reshape(len(logits), -1, PROBABILITY_BLOCK)
    given.block_maxima[:], given.block_sums[:] = blocks.max(axis=2), blocks.sum(axis=2)
    return given


@settings(max_examples=300)
@given(st.lists(rows(), min_size=1, max_size=5))
def test_what_is_settled_is_what_the_row_draws_alone(
    drawn: list[tuple[Logits, Sampler, int]],
) -> None:
    logits = np.array([row for row, _, _ in drawn])
    given = as_a_graph(logits, [sampler.inverse_temperature for _, sampler, _ in drawn])
    wanted = [Wanted(s, line, position) for line, (_, s, position) in enumerate(drawn)]
    tokens = draw_likely(wanted, logits, given)
    for sampler, line, position in wanted:
        alone, _, _ = sampler.sample(logits[line].copy(), position, given.rows(line))
        event("settled" if line in tokens else "left to the draw by itself")
        assert tokens.get(line, alone) == alone
        here = slice(line, line + 1)
        by_itself = draw_likely([Wanted(sampler, 0, position)], logits[here], given.rows(here))
        assert by_itself.get(0) == tokens.get(line)


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.95])
def test_most_draws_are_settled(top_p: float) -> None:
    config = GenerationConfig(temperature=0.8, top_p=top_p)
    logits = np.array([hashed_logits(VOCAB)([position]) for position in range(400)])
    given = as_a_graph(logits, [1 / 0.8] * 400)
    sampler = make_sampler(config, VOCAB, seed=3)
    tokens = draw_likely([Wanted(sampler, i, i) for i in range(400)], logits, given)
    assert len(tokens) > 200
    for line, token in tokens.items():
        assert token == sampler.sample(logits[line].copy(), line, given.rows(line))[0]


@settings(max_examples=500)
@given(
    st.lists(st.floats(LEAST, 1.0).map(np.float32), min_size=1, max_size=30),
    st.floats(0.5, 100),
    st.floats(0.0, 0.9999),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 2**32 - 1),
)
def test_settled_is_right_whatever_the_others_are_and_however_it_was_rounded(
    shares: list[np.float32], scale: float, top_p: float, u: float, seed: int
) -> None:
    """The rest of the mass is spread over tokens below the bound in some way; the true values are
    a little off."""
    likely = np.sort(np.array(shares, np.float64))[::-1]
    likely *= min(1.0, scale / 30) / likely.sum() if likely.sum() > 1 else 1.0
    likely = likely[likely >= LEAST]
    index = settled(likely.tolist(), top_p, u)
    rng = np.random.default_rng(seed)
    true = likely * (1 + rng.uniform(-5e-5, 5e-5, likely.size))
    rest = 1 - true.sum()
    if rest < 0 or not likely.size:
        return
    count = int(rest / (LEAST * rng.uniform(0.2, 0.98))) + 1
    true = np.concatenate([true, np.full(count, rest / count)])
    order = np.argsort(-true, kind="stable")
    ends = true[order].cumsum()
    nucleus = min(int(ends.searchsorted(top_p * ends[-1])), order.size - 1)
    expected = int(order[int(ends.searchsorted(u * ends[nucleus], side="right"))])
    event("settled" if index is not None else "open")
    assert index is None or index == expected


@pytest.mark.parametrize("damage", [np.nan, np.inf, -np.inf])
def test_damaged_lines_are_left_to_the_draw_that_says_what_is_wrong(damage: float) -> None:
    logits = np.stack([bell(VOCAB, 3.0, seed) for seed in range(3)])
    logits[1] = damage
    with np.errstate(invalid="ignore"):
        given = as_a_graph(logits, [1.0] * 3)
    sampler = make_sampler(GenerationConfig(temperature=1.0, top_p=0.5), VOCAB)
    tokens = draw_likely([Wanted(sampler, line, line) for line in range(3)], logits, given)
    assert 1 not in tokens


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"top_p": 0.9, "min_p": 0.1},
        {"top_p": 0.9, "logprobs": 1},
        {"top_p": 0.9, "typical_acceptance": 0.1},
        {"top_p": 0.9, "top_k": 5},
        {"top_p": 0.9, "presence_penalty": 1.0},
        {"top_p": 0.9, "temperature": 0.0},
    ],
    ids=str,
)
def test_requests_that_need_more_are_drawn_alone(values: dict[str, object]) -> None:
    config = GenerationConfig.from_dict({"temperature": 0.8, **values})
    assert not make_sampler(config, VOCAB).draws_likely


def test_a_draw_at_the_end_of_a_token_is_left_open() -> None:
    """As near to a boundary as rounding, nothing is certain."""
    assert settled([0.5, 0.4], 0.9, 0.5 / 0.9) is None
    assert settled([0.5, 0.4], 0.95, 0.3) == 0
    assert settled([0.5, 0.4], 0.95, 0.8) == 1
    assert settled([0.5, 0.4], 0.95, 0.99) is None  # a less likely one
    assert settled([0.3, 0.3], 0.95, 0.1) is None  # which of them comes first?
    assert settled([], 0.95, 0.1) is None
