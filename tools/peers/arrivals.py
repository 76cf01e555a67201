"""Requests of mixed lengths that come at random times: what they are, how they are served.

Shared by driver and workers; needs nothing but Python.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TokenIds = list[int]

PROMPT_TOKENS, NEW_TOKENS = (16, 256), (16, 96)  # shortest and longest, log-uniform between
LONGEST_TOKENS = PROMPT_TOKENS[1] + NEW_TOKENS[1]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes `at_s` seconds after the start."""

    at_s: float
    prompt: TokenIds
    new_tokens: int


def draw_arrivals(
    text_ids: Sequence[int], count: int, per_second: float, seed: int
) -> list[Arrival]:
    """Poisson arrivals; prompts are pieces of the text, taken as a ring."""
    rng = random.Random(seed)
    at_s, arrivals = 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(per_second)
        prompt_tokens, new_tokens = (
            round(low * (high / low) ** rng.random()) for low, high in (PROMPT_TOKENS, NEW_TOKENS)
        )
        start = rng.randrange(len(text_ids))
        prompt = [text_ids[(start + i) % len(text_ids)] for i in range(prompt_tokens)]
        arrivals.append(Arrival(at_s, prompt, new_tokens))
    return arrivals


def serve_in_batches(
    generate: Callable[[Sequence[TokenIds], int], object],
    arrivals: Sequence[Arrival],
    max_batch: int,
    *,
    now: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> list[float]:
    """Dynamic batches, for peers that take no request while others run.

    Whoever waits goes together, up to `max_batch`, and all of a batch until its longest answer is
    complete.

    Returns:
        seconds from the start to the end of each request.
    """
    start = now()
    done_s: list[float] = []
    while len(done_s) < len(arrivals):
        first = arrivals[len(done_s)]
        if (early_s := first.at_s - (now() - start)) > 0:
            sleep(early_s)
        since_s = max(now() - start, first.at_s)
        batch = [a for a in arrivals[len(done_s) :][:max_batch] if a.at_s <= since_s]
        generate([a.prompt for a in batch], max(a.new_tokens for a in batch))
        done_s += [now() - start] * len(batch)
    return done_s
