"""Drafts on against drafts off: tokens per second of the same requests, in turn.

    python tools/bench/drafts.py DIR PROMPTS.jsonl [--sequences 1,4,16] [--prompts 4] [--rounds 3]

A line of the file is `{"category": ..., "turns": [...]}` as in Spec-Bench; first turns are used. A
cell is one category with n sequences at a time, greedy, every answer `--tokens` long; both sides
must write the same tokens. Ratios are paired by round; the summary is their geometric mean.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path
from statistics import geometric_mean, median

import common

from headrace.runtime import Runtime
from headrace.runtime.manifest import read_manifest
from headrace.runtime.package_prompts import encode_prompts


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("package", type=Path, metavar="DIR")
    parser.add_argument("prompts_file", type=Path, metavar="PROMPTS.jsonl")
    parser.add_argument("--sequences", type=common.numbers, default=(1, 4, 16), metavar="LIST")
    parser.add_argument("--prompts", type=int, default=4, help="of each category")
    parser.add_argument("--tokens", type=int, default=96, help="of every answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-draft-tokens", type=int, default=None)
    parser.add_argument("--draft", metavar="DIR", help="smaller package that guesses too")
    args = parser.parse_args()
    prompts = read_prompts(args.prompts_file, args.package, args.prompts)
    options = {
        "max_sequences": max(args.sequences),
        "num_threads": args.threads,
        # Prompts come again, and are to be computed again and guessed from their own text.
        "prefix_cache_bytes": 0,
        "draft_pool_tokens": 0,
    }
    cells = []
    with (
        Runtime.load(args.package, max_draft_tokens=0, **options) as plain,
        Runtime.load(
            args.package,
            max_draft_tokens=args.max_draft_tokens,
            draft_package=args.draft,
            **options,
        ) as drafting,
    ):
        for count in args.sequences:
            for category, ids in prompts.items():
                cell = measure(plain, drafting, ids, count, args.tokens, args.rounds)
                cells.append({"sequences": count, "category": category, **cell})
    lines = [f"{'category':18}{'sequences':>10}{'plain tok/s':>13}{'ratio':>8}{'tokens/row':>12}"]
    for c in cells:
        lines.append(
            f"{c['category']:18}{c['sequences']:10}{c['plain_tok_s']:13.1f}{c['ratio']:8.2f}"
            f"{c['tokens_per_row']:12.2f}"
        )
    for count in args.sequences:
        mean = geometric_mean(c["ratio"] for c in cells if c["sequences"] == count)
        lines.append(f"{'geometric mean':18}{count:10}{'':13}{mean:8.2f}")
    common.show(common.report({"cells": cells}), lines, as_json=args.json)


def read_prompts(path: Path, package: Path, count: int) -> dict[str, list[list[int]]]:
    """Token ids of the first `count` first turns of each category, in the model's chat format."""
    manifest = read_manifest(package)
    assert manifest.tokenizer.chat_template, "the package has no chat template"
    found: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if len(found[entry["category"]]) < count:
            found[entry["category"]].append(entry["turns"][0])
    return {name: encode_prompts(package, manifest, turns) for name, turns in found.items()}


def measure(
    plain: Runtime,
    drafting: Runtime,
    prompts: list[list[int]],
    count: int,
    tokens: int,
    rounds: int,
) -> dict[str, float]:
    """Medians over rounds; the first round warms up and compares the tokens."""
    ratios, plain_tok_s, per_row = [], [], []
    requests = [prompts[i % len(prompts)] for i in range(max(count, len(prompts)))]
    for number in range(rounds + 1):
        slow_s, written, _ = run(plain, requests, count, tokens)
        fast_s, drafted, tokens_per_row = run(drafting, requests, count, tokens)
        assert written == drafted, "drafts changed an answer"
        if number:
            ratios.append(slow_s / fast_s)
            plain_tok_s.append(tokens * len(requests) / slow_s)
            per_row.append(tokens_per_row)
    return {
        "ratio": median(ratios),
        "plain_tok_s": median(plain_tok_s),
        "tokens_per_row": median(per_row),
    }


def run(
    runtime: Runtime, prompts: list[list[int]], count: int, tokens: int
) -> tuple[float, list[tuple[int, ...]], float]:
    """Seconds, the tokens, and tokens that a decode row gave on average; `count` at a time.

    Prompts count as time, since those who decode wait for them.
    """
    written: list[tuple[int, ...]] = []
    last_id = runtime.steps[-1].step_id if runtime.steps else -1
    start = time.perf_counter()
    for i in range(0, len(prompts), count):
        completions = runtime.generate(
            prompts[i : i + count], max_new_tokens=tokens, ignore_eos=True, temperature=0.0
        )
        written += [completion.choices[0].token_ids for completion in completions]
    seconds = time.perf_counter() - start
    accepted = sum(step.accepted for step in runtime.steps if step.step_id > last_id)
    total = tokens * len(prompts)
    return seconds, written, total / (total - accepted)


if __name__ == "__main__":
    main()
