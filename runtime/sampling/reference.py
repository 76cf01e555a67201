"""The slow twin of `sampling`: the same definition in plain loops and float64, nothing clever.

Only tests use it. Where a rounding error of the fast path could change its answer (the uniform
number or a truncation bound is within a margin of a boundary) `Draw.margin` says how close it is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.runtime.config import GenerationConfig
from headrace.runtime.errors import RequestError
from headrace.runtime.sampling.sampler import GREEDY_BELOW, uniform


@dataclass(frozen=True, slots=True)
class Draw:
    """A token, and the smallest distance, in probability, of any decision to its boundary."""

    token_id: int
    margin: float


def adjusted_logits(
    config: GenerationConfig,
    logits: NDArray[np.float32],
    prompt: Sequence[int],
    answer: Sequence[int],
    eos_token_ids: Iterable[int],
    allowed: Collection[int] | None = None,
) -> list[float]:
    """Step 1: penalties, bias and bans, each rounded to float32.

    Args:
        allowed: by the grammar, where there is one.
    """
    adjusted = [float(value) for value in logits]
    seen = {*prompt, *answer} if config.repetition_penalty != 1.0 else set(answer)
    counts = Counter(answer)
    for token in seen:
        value = adjusted[token]
        if value > 0:
            value /= config.repetition_penalty
        else:
            value *= config.repetition_penalty
        if counts[token]:
            value -= config.presence_penalty + config.frequency_penalty * counts[token]
        adjusted[token] = float(np.float32(value))
    for token, bias in config.logit_bias.items():
        adjusted[token] = float(np.float32(adjusted[token] + bias))
    if len(answer) < config.min_new_tokens:
        for token in {*config.stop_token_ids, *eos_token_ids}:
            adjusted[token] = -math.inf
    if allowed is not None:
        adjusted = [v if i in allowed else -math.inf for i, v in enumerate(adjusted)]
    return adjusted


def kept_tokens(
    config: GenerationConfig, adjusted: Sequence[float]
) -> tuple[list[int], list[float], float]:
    """Step 3: ids in the order of the draw, their probabilities, and the margin of the bounds."""
    peak = max(adjusted)
    weights = [math.exp((value - peak) / config.temperature) for value in adjusted]
    total = math.fsum(weights)
    probabilities = [weight / total for weight in weights]
    ids = list(range(len(adjusted)))
    margin = math.inf
    top_k = config.top_k or len(ids)
    if top_k < len(ids) or config.top_p < 1.0 or config.min_p > 0.0:
        ids.sort(key=lambda i: (-adjusted[i], i))
    ids = ids[:top_k]
    if config.top_p < 1.0:
        total = math.fsum(probabilities[i] for i in ids)
        for kept in range(1, len(ids) + 1):
            mass = math.fsum(probabilities[i] for i in ids[:kept]) / total
            margin = min(margin, abs(mass - config.top_p))
            if mass >= config.top_p:
                ids = ids[:kept]
                break
    if config.min_p > 0.0:
        shares = {i: probabilities[i] / probabilities[ids[0]] for i in ids}
        margin = min(margin, *(abs(share - config.min_p) for share in shares.values()))
        ids = [i for i in ids if shares[i] >= config.min_p] or ids[:1]
    total = math.fsum(probabilities[i] for i in ids)
    return ids, [probabilities[i] / total for i in ids], margin


def sample(
    config: GenerationConfig,
    logits: NDArray[np.float32],
    prompt: Sequence[int],
    answer: Sequence[int],
    eos_token_ids: Iterable[int],
    seed: int,
    position: int,
    allowed: Collection[int] | None = None,
) -> Draw:
    """Steps 1 to 4 for the token after `prompt` and `answer`.

    Raises:
        RequestError: no token is left.
    """
    adjusted = adjusted_logits(config, logits, prompt, answer, eos_token_ids, allowed)
    if max(adjusted) == -math.inf:
        raise RequestError("no token is left to draw")
    if config.temperature < GREEDY_BELOW:
        return Draw(adjusted.index(max(adjusted)), math.inf)
    ids, probabilities, margin = kept_tokens(config, adjusted)
    u = uniform(seed, position)
    cumulative, drawn = 0.0, None
    for token, probability in zip(ids, probabilities, strict=True):
        cumulative += probability
        if len(ids) > 1:
            margin = min(margin, abs(cumulative - u))
        if drawn is None and cumulative > u and probability > 0:
            drawn = token
    if drawn is None:  # u is at 1 up to rounding
        drawn = next(i for i, p in zip(reversed(ids), reversed(probabilities), strict=True) if p)
    return Draw(drawn, margin)


def typical_margin(config: GenerationConfig, adjusted: Sequence[float], token_id: int) -> float:
    """p(token) - min(epsilon, sqrt(epsilon) * exp(-H)): a draft is taken from 0 on."""
    peak = max(adjusted)
    weights = [math.exp((value - peak) / config.temperature) for value in adjusted]
    total = math.fsum(weights)
    probabilities = [weight / total for weight in weights]
    entropy_nats = -math.fsum(p * math.log(p) for p in probabilities if p)
    epsilon = config.typical_acceptance
    return probabilities[token_id] - min(epsilon, math.sqrt(epsilon) * math.exp(-entropy_nats))


def log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """log softmax, nats, in float64. Shape [vocab]."""
    values = logits.astype(np.float64)
    peak = values.max()
    nats: NDArray[np.float64] = values - (peak + math.log(np.exp(values - peak).sum()))
    return nats
