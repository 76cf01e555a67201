"""What drafting costs the host: time to decide who gets which drafts, a step.

    python tools/bench/gate.py [--sequences 1,4,16] [--steps 400] [--rounds 5] [--json]

No model: texts are made of phrases that recur as words do (Zipf), in a vocabulary of 49,152, and
every step takes a token or the drafts that are right. Without the pool, with an empty one, and with
one that is full of other answers. A step of n tokens is thought to take 7 + 0.5 n ms, which is
about what SmolLM2-135M takes on two cores.
"""

from __future__ import annotations

import random
import time
from statistics import median

import common

from headrace.runtime.config import EngineConfig
from headrace.runtime.core import SampledToken, Sequence
from headrace.runtime.drafting.drafter import DEFAULT_DRAFT_TOKENS, Drafter

PROMPT_TOKENS = 200
SIDES = {"own text": (0, 0), "empty pool": (1, 0), "full pool": (1, 1)}  # pools, times filled


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--sequences", type=common.numbers, default=(1, 4, 16), metavar="LIST")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    pool_tokens = EngineConfig().draft_pool_tokens
    cases = []
    for count in args.sequences:
        found: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
        for number in range(args.rounds):
            for side, (pools, fills) in SIDES.items():
                drafter = Drafter(DEFAULT_DRAFT_TOKENS, pool_tokens=pools * pool_tokens)
                fill(drafter, fills * pool_tokens)
                found[side].append(measure(drafter, count, args.steps, seed=number))
        for side, pairs in found.items():
            cost_us, tokens = (median(values) for values in zip(*pairs, strict=True))
            share = cost_us / (1000 * step_ms(tokens))
            case = {"sequences": count, "side": side, "us": cost_us, "tokens": tokens}
            cases.append({**case, "share": share})
    lines = [f"{'sequences':>10}  {'drafts from':12}{'us a step':>10}{'tokens':>8}{'share':>8}"]
    for c in cases:
        figures = f"{c['us']:10.1f}{c['tokens']:8.1f}{c['share']:8.2%}"
        lines.append(f"{c['sequences']:10}  {c['side']:12}{figures}")
    common.show(
        common.report({"pool_tokens": pool_tokens, "cases": cases}), lines, as_json=args.json
    )


def fill(drafter: Drafter, num_tokens: int) -> None:
    """Let answers of 500 tokens end."""
    for number in range(0, num_tokens, 500):
        sequence = Sequence(-1 - number, make_text(number, 500), 1, 1000)
        drafter.propose([sequence])
        drafter.forget(sequence)


def step_ms(num_tokens: float) -> float:
    return 7.0 + 0.5 * num_tokens


def measure(drafter: Drafter, count: int, steps: int, seed: int) -> tuple[float, float]:
    """Mean processor time in us and mean tokens of a step; prompts are indexed before."""
    texts = [make_text(10**6 + 1000 * seed + i, PROMPT_TOKENS + 9 * steps) for i in range(count)]
    sequences = [
        Sequence(i, text[: PROMPT_TOKENS + 1], PROMPT_TOKENS, 10 * steps)
        for i, text in enumerate(texts)
    ]
    drafter.propose(sequences)
    total_s, total_tokens = 0.0, 0
    for _ in range(steps):
        start = time.thread_time()
        drafts = drafter.propose(sequences)
        total_s += time.thread_time() - start
        outcomes = []
        for sequence, text in zip(sequences, texts, strict=True):
            guesses, end = drafts.get(sequence.seq_id, ()), len(sequence.tokens)
            truth = text[end : end + len(guesses) + 1]
            right = next((i for i, g in enumerate(guesses) if g != truth[i]), len(guesses))
            sampled = tuple([SampledToken(token, 0.5) for token in truth[: right + 1]])
            outcomes.append((len(guesses), sampled))
            sequence.tokens += truth[: right + 1]
        num_tokens = count + sum(num_drafts for num_drafts, _ in outcomes)
        total_tokens += num_tokens
        start = time.thread_time()
        for sequence, (num_drafts, sampled) in zip(sequences, outcomes, strict=True):
            drafter.observe(sequence.seq_id, num_drafts, sampled)
        drafter.observe_step(num_tokens, step_ms(num_tokens))
        total_s += time.thread_time() - start
    return 1e6 * total_s / steps, total_tokens / steps


def make_text(seed: int, num_tokens: int) -> list[int]:
    """Phrases of 2 to 12 tokens, the n-th most frequent with a frequency of 1 / n."""
    rng, tokens = random.Random(seed), list[int]()
    while len(tokens) < num_tokens:
        phrase = random.Random(int(5000 ** rng.random()))
        tokens += [phrase.randrange(49152) for _ in range(phrase.randrange(2, 13))]
    return tokens[:num_tokens]


if __name__ == "__main__":
    main()
