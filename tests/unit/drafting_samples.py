"""What tests of draft models and of draft heads have in common."""

from __future__ import annotations

import random
from typing import Any

from engine_samples import VOCAB, run_arrivals

from headrace.runtime.config import GenerationConfig
from headrace.runtime.core import SampledToken, Sequence
from headrace.runtime.drafting.drafter import Drafter
from headrace.runtime.engine import Engine

CONFIGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.8, "top_p": 0.95, "seed": 5, "ignore_eos": True},
    {"temperature": 0.0, "repetition_penalty": 1.1, "stop": "ab", "n": 2},
]


def count_upwards(drafter: Drafter, is_right: bool) -> tuple[int, int]:
    """Two sequences count upwards for 300 steps; how many tokens were drafted and accepted in all.

    Args:
        is_right: whether drafts are.
    """
    sequences = [Sequence(i, [1000 * i, 1000 * i + 1], 2, 10**6) for i in range(2)]
    drafted = accepted = 0
    for _ in range(300):
        drafts = drafter.propose(sequences)
        num_tokens = len(sequences) + sum(map(len, drafts.values()))
        for sequence in sequences:
            own = drafts.get(sequence.seq_id, ())
            right = len(own) if is_right else 0
            last = sequence.tokens[-1]
            sampled = tuple(SampledToken(last + 1 + i, 0.1) for i in range(right + 1))
            sequence.tokens += [token.token_id for token in sampled]
            drafter.observe(sequence.seq_id, len(own), sampled)
            drafted, accepted = drafted + len(own), accepted + right
        drafter.observe_step(num_tokens, 10.0 + 0.2 * num_tokens)
    return drafted, accepted


def answers_in_a_storm(engine: Engine, seed: int) -> list[Any]:
    """Of requests that arrive at random, one of them cancelled, some urgent enough to interrupt."""
    rng = random.Random(seed)
    arrivals = []
    for step in sorted(rng.randrange(40) for _ in range(6)):
        prompt = [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 40))]
        priority = rng.choice([0, 0, 9])
        config = GenerationConfig(max_new_tokens=50, priority=priority, **rng.choice(CONFIGS))
        arrivals.append((step, prompt, config))
    return run_arrivals(engine, arrivals, cancel_at=12)
