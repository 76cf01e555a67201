"""Microseconds of sampling per row of logits, by kind of request. One thread; the machine quiet.

python tools/bench/sampling.py [--vocab 49152] [--repeats 30] [--json]
"""

from __future__ import annotations

import argparse
import json
import timeit

import numpy as np

from headrace.runtime.config import GenerationConfig
from headrace.runtime.sampling.candidates import Logits, Scratch
from headrace.runtime.sampling.sampler import Sampler

ROWS = 16
CONFIGS: dict[str, dict[str, object]] = {
    "greedy": {},
    "temperature 0.8, top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "temperature 0.8, top_k 40, top_p 0.95": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    "temperature 0.8, min_p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "temperature 1": {"temperature": 1.0},
    "greedy, repetition 1.1, 500 seen": {"repetition_penalty": 1.1},
    "greedy, 5 logprobs": {"logprobs": 5},
}


def synthetic_logits(vocab_size: int, entropy: str) -> Logits:
    """float32 [ROWS, vocab]: a bell of width 2.5 and 40 likely tokens above it."""
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(ROWS, vocab_size)) * 2.5).astype(np.float32)
    height = {"low": 22.0, "high": 13.0}[entropy]
    for row in logits:
        row[rng.choice(vocab_size, 40, replace=False)] = np.linspace(8.0, height, 40)
    return logits


def us_per_row(config: GenerationConfig, logits: Logits, repeats: int) -> float:
    """Best of `repeats` passes over all rows; each row is copied in, which is not counted."""
    vocab_size = logits.shape[1]
    scratch = Scratch(vocab_size)
    prompt = np.random.default_rng(1).choice(vocab_size, 500, replace=False).tolist()
    sampler = Sampler(config, prompt, (2,), 0, scratch)
    work = logits.copy()

    def copy() -> None:
        np.copyto(work, logits)

    def run() -> None:
        for position, row in enumerate(work):
            sampler.sample(row, position)

    return min(timeit.repeat(run, copy, number=1, repeat=repeats)) / ROWS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    for entropy in ("low", "high"):
        logits = synthetic_logits(args.vocab, entropy)
        for name, values in CONFIGS.items():
            config = GenerationConfig.from_dict(values)
            figures.setdefault(name, {})[entropy] = us_per_row(config, logits, args.repeats)
    if args.json:
        print(json.dumps({"unit": "us_per_row", "vocab": args.vocab, "figures": figures}))
        return
    print(f"{'us per row, vocabulary ' + str(args.vocab):45}{'low':>8}{'high':>8}  entropy")
    for name, by_entropy in figures.items():
        print(f"{name:45}{by_entropy['low']:8.1f}{by_entropy['high']:8.1f}")


if __name__ == "__main__":
    main()
