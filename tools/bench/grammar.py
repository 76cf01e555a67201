"""What a grammar costs the host: microseconds a token, by part, beside a draw without one.

    python tools/bench/grammar.py PACKAGE

A schema is filled in from a text that fits it; logits are random. No model runs. The first line of
figures is of a grammar that was never met, the others of one whose tables are warm.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path

import numpy as np

from headrace.runtime.config import GenerationConfig
from headrace.runtime.grammar.matcher import GrammarCompiler
from headrace.runtime.grammar.spec import Grammar
from headrace.runtime.manifest import read_manifest
from headrace.runtime.sampling.candidates import Scratch
from headrace.runtime.sampling.sampler import Sampler
from headrace.runtime.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TEXT = '{"name": "Ada Lovelace of London", "age": 36, "tags": ["analyst", "countess", "first"]}'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("package", type=Path)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    manifest = read_manifest(args.package)
    tokenizer = Tokenizer.load(args.package, manifest.tokenizer)
    size, eos = manifest.model.vocab_size, manifest.tokenizer.eos_token_ids
    compiler = GrammarCompiler(tokenizer, size, eos)
    start = time.perf_counter()
    compiler.matcher(Grammar.regex("a"))
    print(f"vocabulary of {size} tokens, once: {time.perf_counter() - start:.2f} s")
    start = time.perf_counter()
    grammar = Grammar.json_schema(SCHEMA)
    compiler.matcher(grammar)
    print(f"compiling the schema, once: {(time.perf_counter() - start) * 1e3:.1f} ms")
    config = GenerationConfig(temperature=args.temperature, seed=1, grammar=grammar)
    ids = tokenizer.encode_fragment(TEXT)
    row = np.random.default_rng(0).normal(size=size).astype(np.float32)
    print("us a token: mask and advance / draw under it / draw without; tokens, of them forced")
    for _ in range(4):
        matcher, scratch = compiler.matcher(grammar), Scratch(size)
        held = Sampler(config, [1], eos, 1, scratch, matcher)
        free = Sampler(config, [1], eos, 1, scratch)
        spent, forced = [0.0, 0.0, 0.0], 0
        for position, token in enumerate(ids):
            forced += bool(held.forced)
            rows = row.copy(), row.copy()
            times = [time.perf_counter()]
            held.sample(rows[0], position)
            times.append(time.perf_counter())
            free.sample(rows[1], position)
            times.append(time.perf_counter())
            held.accept(token)
            times.append(time.perf_counter())
            for part, (a, b) in enumerate(itertools.pairwise(times)):
                spent[part] += (b - a) * 1e6 / len(ids)
        drawn, plain, advanced = spent
        print(f"{advanced:6.0f} / {drawn:5.0f} / {plain:5.0f}; {len(ids)}, {forced}")


if __name__ == "__main__":
    main()
