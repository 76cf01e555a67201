"""Samplers, logits and random requests for the tests of sampling."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from headrace.runtime.config import GenerationConfig
from headrace.runtime.sampling.candidates import Logits, Scratch
from headrace.runtime.sampling.sampler import Sampler

# A uniform number or truncation bound this near to a boundary may fall to either side in float32.
AMBIGUOUS = 1e-6


def make_sampler(
    config: GenerationConfig,
    vocab_size: int,
    *,
    prompt: list[int] | None = None,
    answer: list[int] | None = None,
    eos: tuple[int, ...] = (),
    seed: int = 0,
) -> Sampler:
    sampler = Sampler(config, prompt or [0], eos, seed, Scratch(vocab_size))
    for token in answer or []:
        sampler.accept(token)
    return sampler


def bell(vocab_size: int, scale: float, seed: int) -> Logits:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=vocab_size) * scale).astype(np.float32)


temperatures = st.one_of(
    st.just(0.0), st.just(1.0), st.floats(0.05, 5.0), st.sampled_from((1e39, 1e308))
)


@st.composite
def configs(draw: st.DrawFn, vocab_size: int) -> GenerationConfig:
    tokens = st.integers(0, vocab_size - 1)
    return GenerationConfig(
        temperature=draw(temperatures),
        top_k=draw(st.one_of(st.just(0), st.integers(1, 2 * vocab_size))),
        top_p=draw(st.one_of(st.just(1.0), st.floats(0.0, 1.0))),
        min_p=draw(st.one_of(st.just(0.0), st.floats(0.0, 1.0))),
        repetition_penalty=draw(st.one_of(st.just(1.0), st.floats(0.5, 2.0))),
        presence_penalty=draw(st.one_of(st.just(0.0), st.floats(-2, 2))),
        frequency_penalty=draw(st.one_of(st.just(0.0), st.floats(-2, 2))),
        logit_bias=draw(
            st.dictionaries(tokens, st.floats(-100, 100) | st.just(-math.inf), max_size=2)
        ),
        min_new_tokens=draw(st.integers(0, 4)),
        stop_token_ids=draw(st.lists(tokens, max_size=1).map(tuple)),
    )


@st.composite
def plain_configs(draw: st.DrawFn, vocab_size: int) -> GenerationConfig:
    """What probabilities that the graph computed are of use to."""
    top_p = draw(st.one_of(st.just(1.0), st.floats(0.0, 1.0)))
    return GenerationConfig(
        temperature=draw(st.floats(0.05, 5.0)),
        top_p=top_p,
        min_p=draw(st.floats(0.0, 1.0)) if top_p < 1.0 else 0.0,
        stop_token_ids=draw(st.lists(st.integers(0, vocab_size - 1), max_size=1).map(tuple)),
    )


@st.composite
def cases(
    draw: st.DrawFn,
    vocab_sizes: tuple[int, ...] = (4, 5, 63, 64, 65, 256, 300, 700),
    make_config: Callable[[int], st.SearchStrategy[GenerationConfig]] = configs,
) -> tuple[GenerationConfig, Logits, list[int], list[int], int, int]:
    vocab_size = draw(st.sampled_from(vocab_sizes))
    if draw(st.booleans()):  # many ties, zeros of both signs
        values = st.sampled_from([-2.0, -0.0, 0.0, 1.0, 5.0])
        logits = draw(hnp.arrays(np.float32, vocab_size, elements=values, fill=st.just(-1.0)))
    else:
        logits = bell(vocab_size, draw(st.floats(0.1, 20)), draw(st.integers(0, 2**32)))
        logits += np.float32(draw(st.sampled_from([0.0, 30.0, -200.0, 1e4])))
    tokens = st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=6)
    seed, position = draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 2**20))
    return draw(make_config(vocab_size)), logits, draw(tokens), draw(tokens), seed, position
