"""Rejection sampling, the baseline of keyed verification: it equals its definition, and neither
changes the distribution."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rejection import acceptance, filtered, propose, verify
from sampling_samples import AMBIGUOUS, bell, make_sampler

from headrace.runtime.config import GenerationConfig
from headrace.runtime.sampling import reference
from headrace.runtime.sampling.sampler import sample_seed, uniform

VOCAB = 12
DRAWS = 20_000
CONFIG = GenerationConfig(temperature=0.8, top_p=0.95)
TARGET, DRAFT = bell(VOCAB, 1.5, 1), bell(VOCAB, 1.5, 2)


@settings(max_examples=100)
@given(
    st.integers(0, 10**6),
    st.floats(0.2, 3.0),
    st.integers(0, VOCAB + 2),
    st.floats(0.05, 1.0),
    st.floats(0.0, 1.0),
)
def test_filtered_is_what_the_sampler_draws_from(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    config = GenerationConfig(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = bell(VOCAB, 2.0, seed)
    ids, probabilities, margin = reference.kept_tokens(config, logits.tolist())
    expected = np.zeros(VOCAB)
    expected[ids] = probabilities
    if margin > AMBIGUOUS:
        np.testing.assert_allclose(filtered(logits, config), expected, atol=1e-9)


def slow_verify(p: list[float], q: list[float], draft: int, seed: int, position: int) -> int:
    """The definition in plain loops."""
    if uniform(sample_seed(seed, 2), position) < min(1.0, p[draft] / q[draft]):
        return draft
    rest = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    u, cumulative = uniform(sample_seed(seed, 3), position), 0.0
    for token, weight in enumerate(rest):
        cumulative += weight / math.fsum(rest)
        if cumulative > u:
            return token
    raise AssertionError("rounding")


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**6))
def test_fast_equals_slow(seed: int, position: int) -> None:
    p, q = filtered(bell(VOCAB, 1.5, seed % 97), CONFIG), filtered(DRAFT, CONFIG)
    draft = propose(q, seed, position)
    token, is_draft = verify(p, q, draft, seed, position)
    assert token == slow_verify(p.tolist(), q.tolist(), draft, seed, position)
    assert is_draft is (token == draft)


P, Q = filtered(TARGET, CONFIG), filtered(DRAFT, CONFIG)
SAMPLER = make_sampler(CONFIG, VOCAB, seed=7)


def by_rejection(position: int) -> tuple[int, bool]:
    return verify(P, Q, propose(Q, 7, position), 7, position)


def by_key(position: int) -> tuple[int, bool]:
    token, _, _ = SAMPLER.sample(TARGET.copy(), position)
    return token, token == int(DRAFT.argmax())


@pytest.mark.parametrize("draw", [by_rejection, by_key])
def test_the_distribution_is_the_targets(draw: Callable[[int], tuple[int, bool]]) -> None:
    """Chi-square over a small vocabulary; the bound is passed by one in a million at random."""
    found = [draw(position) for position in range(DRAWS)]
    counts = Counter(token for token, _ in found)
    assert all(P[token] > 0 for token in counts)
    kept = [token for token in range(VOCAB) if P[token] > 0]
    expected = [DRAWS * P[token] for token in kept]
    chi_square = sum((counts[t] - e) ** 2 / e for t, e in zip(kept, expected, strict=True))
    freedom = len(kept) - 1
    # Wilson and Hilferty, 1931: the cube root is nearly normal; 4.75 sigma.
    third = 2 / (9 * freedom)
    assert chi_square < freedom * (1 - third + 4.75 * math.sqrt(third)) ** 3
    rate = acceptance(P, Q) if draw is by_rejection else float(P[int(DRAFT.argmax())])
    assert sum(accepted for _, accepted in found) / DRAWS == pytest.approx(rate, abs=0.02)
