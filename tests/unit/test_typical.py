"""Typical acceptance: the rule, that it is off unless asked for, and what it may not do."""

from __future__ import annotations

import math
from typing import Any

import pytest
from engine_samples import Answers, make_engine, run_to_end
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_samples import AMBIGUOUS, bell, make_sampler

from headrace.backends.fake import FakeBackend, hashed_logits
from headrace.runtime.config import GenerationConfig
from headrace.runtime.sampling import reference

VOCAB = 64


@settings(max_examples=200)
@given(
    st.integers(0, 10**6),
    st.floats(0.1, 8.0),
    st.floats(0.2, 3.0),
    st.floats(0.001, 1.0),
    st.sets(st.integers(0, VOCAB - 1), max_size=3),
)
def test_a_draft_is_taken_by_the_rule(
    seed: int, scale: float, temperature: float, epsilon: float, banned: set[int]
) -> None:
    config = GenerationConfig(
        temperature=temperature,
        typical_acceptance=epsilon,
        logit_bias=dict.fromkeys(banned, -math.inf),
    )
    logits = bell(VOCAB, scale, seed)
    adjusted = reference.adjusted_logits(config, logits, [0], [], ())
    plain, _, _ = make_sampler(config, VOCAB, seed=1).sample(logits.copy(), 5)
    for draft in range(VOCAB):
        token, _, _ = make_sampler(config, VOCAB, seed=1).sample(logits.copy(), 5, None, draft)
        margin = reference.typical_margin(config, adjusted, draft)
        if abs(margin) > AMBIGUOUS or draft in banned:
            assert token == (draft if margin > 0 else plain)


@pytest.mark.parametrize("values", [{"temperature": 0.8}, {"typical_acceptance": 0.09}], ids=str)
def test_drafts_say_nothing_where_it_is_off_or_greedy(values: dict[str, Any]) -> None:
    sampler, logits = make_sampler(GenerationConfig(**values), VOCAB), bell(VOCAB, 1.0, 3)
    plain = sampler.sample(logits.copy(), 2)
    assert all(sampler.sample(logits.copy(), 2, None, draft) == plain for draft in range(VOCAB))


def test_it_takes_more_drafts_from_the_own_text() -> None:
    logits, steps = hashed_logits(VOCAB, 1.5), []
    for epsilon in (0.0, 0.02):
        engine = make_engine(FakeBackend(logits=lambda prefix: logits(prefix[-2:])))
        config = GenerationConfig(
            max_new_tokens=60, temperature=1.0, seed=1, ignore_eos=True, typical_acceptance=epsilon
        )
        engine.add(engine.prepare([1, 2, 3, 4, 5, 6, 7, 8] * 4, config))
        run_to_end(engine, Answers())
        steps.append(len(engine.steps))
    assert steps[1] < steps[0]


def test_texts_of_others_cannot_change_an_answer() -> None:
    prompts = [[1, 2, 3, 4, 5]] * 2  # the same again
    logits = hashed_logits(VOCAB)
    for epsilon, shared in [(0.0, True), (0.02, False)]:
        engine, answers = make_engine(FakeBackend(logits=logits)), Answers()
        config = GenerationConfig(
            max_new_tokens=60, temperature=0.5, seed=1, ignore_eos=True, typical_acceptance=epsilon
        )
        for prompt in prompts:
            engine.add(engine.prepare(prompt, config))
            run_to_end(engine, answers)
        first, second = answers.tokens.values()
        assert first == second
        assert (sum(record.drafted for record in engine.steps) > 0) is shared
