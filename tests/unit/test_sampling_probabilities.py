"""Sampling from probabilities that the model's graph computed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from sampling_samples import AMBIGUOUS, bell, cases, make_sampler, plain_configs

from headrace.backends.base import Probabilities
from headrace.runtime import Runtime
from headrace.runtime.config import GenerationConfig
from headrace.runtime.manifest import PROBABILITY_BLOCK
from headrace.runtime.sampling import reference
from headrace.runtime.sampling.candidates import Logits, sole_candidate


@settings(max_examples=200)
@given(cases((256, 700), plain_configs))
def test_given_probabilities_draw_the_same(
    case: tuple[GenerationConfig, Logits, list[int], list[int], int, int],
) -> None:
    """Probabilities computed elsewhere, in float32, replace the exponentials."""
    config, logits, prompt, answer, seed, position = case
    sampler = make_sampler(config, logits.size, prompt=prompt, answer=answer, eos=(0,), seed=seed)
    assert sampler.inverse_temperature == 1 / config.temperature
    scaled = (logits - logits.max()) * np.float32(sampler.inverse_temperature)
    weights = np.exp(scaled)
    probabilities = weights / weights.sum()
    slow = reference.sample(config, logits, prompt, answer, (0,), seed, position)
    token, _, _ = sampler.sample(logits.copy(), position, in_blocks(probabilities))
    if slow.margin < AMBIGUOUS:
        event("ambiguous: within 1e-6 of a boundary")
    else:
        assert token == slow.token_id


@settings(max_examples=200)
@given(
    st.integers(0, 2**32 - 1),
    st.floats(0, 14).map(np.float32),
    st.floats(0.05, 0.999),
    st.integers(0, 699),
)
def test_a_token_that_is_the_whole_nucleus_is_drawn_without_a_search(
    seed: int, lead: np.float32, top_p: float, ahead: int
) -> None:
    logits = bell(700, 1.0, seed)
    logits[ahead] = logits.max() + lead
    weights = np.exp(logits - logits[ahead])
    given = in_blocks(weights / weights.sum())
    config = GenerationConfig(temperature=1.0, top_p=top_p)
    sole = sole_candidate(given.values, given.block_maxima, top_p)
    share, needed = float(weights[ahead] / weights.sum()), max(top_p, 0.5) * (1 + 1e-5)
    if abs(share - needed) > 1e-6:
        assert sole == (ahead if share > needed else None)
    slow = reference.sample(config, logits, [0], [], (), seed, 1)
    token, _, _ = make_sampler(config, 700, seed=seed).sample(logits.copy(), 1, given)
    assert token == slow.token_id or slow.margin < AMBIGUOUS
    event("sole" if sole is not None else "several")


def in_blocks(probabilities: Logits) -> Probabilities:
    """As a graph gives them: padded to whole blocks, with the largest and the sum of each."""
    given = Probabilities.empty(1, probabilities.size).rows(0)
    given.values[:] = 0
    given.values[: probabilities.size] = probabilities
    blocks = given.values.reshape(-1, PROBABILITY_BLOCK)
    given.block_maxima[:], given.block_sums[:] = blocks.max(axis=1), blocks.sum(axis=1)
    return given


@pytest.mark.parametrize(
    "values",
    [{"repetition_penalty": 1.1}, {"logit_bias": {3: 1.0}}, {"min_new_tokens": 2}, {"top_k": 5}],
    ids=str,
)
def test_no_probabilities_where_logits_are_changed_or_cut_first(values: dict[str, Any]) -> None:
    config = GenerationConfig(temperature=0.8, **values)
    assert make_sampler(config, 64).inverse_temperature == 0.0


@pytest.mark.parametrize("temperature", [1e37, 1e39, 1e45, 1.7e308])
def test_no_probabilities_where_float32_has_no_such_temperature(temperature: float) -> None:
    """A graph computes them where the float32 is above 0; whoever waits must agree with it."""
    inverse = make_sampler(GenerationConfig(temperature=temperature), 64).inverse_temperature
    assert (inverse > 0) == (np.float32(inverse) > 0)
    assert (inverse > 0) == (temperature < 1e38)


def test_a_step_of_rows_so_hot_that_their_weights_are_all_the_same(
    tiny_package: Callable[..., Path],
) -> None:
    config = GenerationConfig(temperature=sys.float_info.max, max_new_tokens=4, ignore_eos=True)
    with Runtime.load(tiny_package("fp32", "fp32"), device="cpu") as runtime:
        answers = runtime.generate(["a", "b"], config)
    assert [len(answer.token_ids) for answer in answers] == [4, 4]
