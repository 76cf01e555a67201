"""Drafts on, in a storm, against drafts off: every token of every answer, without tolerance.

    python tools/bench/equality.py DIR PROMPTS.jsonl [--prompts 200] [--tokens 128]
                                   [--prompt-tokens 4096]

The plain side answers all prompts without drafts and without kept texts. The other one has few
slots and gets the same prompts at random times and priorities, so that answers are interrupted, and
between them copies that are cancelled somewhere; drafts, their pool and the prefix cache are on.
Greedy first, then at temperature 0.8. A line of the file is `{"turns": [...]}` as in Spec-Bench.
Exits with 1 if a token differs.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
from drafts import read_prompts

from headrace.runtime import Runtime
from headrace.runtime.worker import RequestHandle

PLAIN_SLOTS = 16
STORM_SLOTS = 6
IN_FLIGHT = 14
CANCELLED_SHARE = 0.2
PRIORITIES = (0, 0, 0, 2, 4)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("package", type=Path, metavar="DIR")
    parser.add_argument("prompts_file", type=Path, metavar="PROMPTS.jsonl")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=128, help="of every answer")
    parser.add_argument(
        "--prompt-tokens", type=int, default=4096, help="of a prompt: its last ones"
    )
    args = parser.parse_args()
    by_category = read_prompts(args.prompts_file, args.package, args.prompts)
    prompts = [ids[-args.prompt_tokens :] for category in by_category.values() for ids in category]
    prompts = random.Random(0).sample(prompts, min(args.prompts, len(prompts)))
    lines, cases = [], []
    for temperature in (0.0, 0.8):
        options = {
            "temperature": temperature,
            "max_new_tokens": args.tokens,
            "ignore_eos": True,
        }
        wanted = plain(args.package, prompts, options, args.threads)
        written, counts = storm(args.package, prompts, options, args.threads)
        different = [i for i, ids in enumerate(wanted) if ids != written[i]]
        cases.append({"temperature": temperature, "different": different, **counts})
        print(f"temperature {temperature}: {len(different)} differ", file=sys.stderr)
        lines.append(
            f"temperature {temperature}: {len(different)} of {len(prompts)} answers differ; "
            + ", ".join(f"{count} {name}" for name, count in counts.items())
        )
    common.show(common.report({"tokens": args.tokens, "cases": cases}), lines, as_json=args.json)
    raise SystemExit(1 if any(case["different"] for case in cases) else 0)


def plain(
    package: Path, prompts: list[list[int]], options: dict[str, Any], threads: int | None
) -> list[tuple[int, ...]]:
    """The answers without anything that could change them; prompt i has seed i."""
    with Runtime.load(
        package,
        max_sequences=PLAIN_SLOTS,
        num_threads=threads,
        max_draft_tokens=0,
        prefix_cache_bytes=0,
    ) as runtime:
        handles = (runtime.submit(ids, seed=i, **options) for i, ids in enumerate(prompts))
        return [answer for _, answer in finish_in_order(handles, PLAIN_SLOTS)]


def storm(
    package: Path, prompts: list[list[int]], options: dict[str, Any], threads: int | None
) -> tuple[dict[int, tuple[int, ...]], dict[str, int]]:
    """Answers by prompt, and what happened on the way."""
    rng = random.Random(1)
    counts = {"cancelled": 0, "interrupted": 0, "drafted": 0, "accepted": 0}
    written: dict[int, tuple[int, ...]] = {}
    order = list(range(len(prompts)))
    rng.shuffle(order)
    with Runtime.load(package, max_sequences=STORM_SLOTS, num_threads=threads) as runtime:
        interrupt = runtime._engine._scheduler._interrupt

        def counting(sequence: Any) -> None:
            counts["interrupted"] += 1
            interrupt(sequence)

        runtime._engine._scheduler._interrupt = counting  # type: ignore[method-assign]

        def requests() -> Iterator[RequestHandle]:
            for i in order:
                time.sleep(rng.expovariate(10.0))
                if rng.random() < CANCELLED_SHARE:
                    lost = runtime.submit(prompts[rng.choice(order)], seed=i, **options)
                    for _, _delta in zip(range(rng.randint(0, 40)), lost, strict=False):
                        pass
                    lost.cancel()
                    counts["cancelled"] += 1
                yield runtime.submit(prompts[i], seed=i, priority=rng.choice(PRIORITIES), **options)

        for number, answer in finish_in_order(requests(), IN_FLIGHT):
            written[order[number]] = answer
        counts["drafted"] = sum(step.drafted for step in runtime.steps)
        counts["accepted"] = sum(step.accepted for step in runtime.steps)
    return written, counts


def finish_in_order(
    handles: Iterator[RequestHandle], in_flight: int
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Number and tokens of each answer, with up to `in_flight` requests under way."""
    running: list[RequestHandle] = []
    number = 0
    for handle in handles:
        running.append(handle)
        if len(running) == in_flight:
            yield number, running.pop(0).result().choices[0].token_ids
            number += 1
    for handle in running:
        yield number, handle.result().choices[0].token_ids
        number += 1


if __name__ == "__main__":
    main()
