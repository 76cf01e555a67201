"""Who gets the rows of a step: the shipped policy against others, on one engine and its kernels.

    python tools/bench/policies.py DIR PROMPTS.jsonl [...] [--sequences 1,4,16] [--requests 2] [...]

A line of a file is `{"category": ..., "turns": [...]}` as in Spec-Bench;
editing_prompts.jsonl beside this script has work on a given text. A cell is one category
with n sequences in flight; all its requests are there from the start, output lengths are drawn as
chats have them (log-normal, median 64, sigma 1, from 16 to 512), greedy, and every side must write
the same tokens. Prompts with an odd number tune (the best fixed length, and what drafters learn);
those with an even number are reported. Sides take turns step by step, each by a clock of its own
(`lockstep.py`), so that a slow spell of the machine is everybody's; ratios are paired by cell and
round, with a 95% interval of their geometric mean over cells. A round has other lengths.

    static      batches of n; who is finished keeps its row until the longest is (B0)
    dropping    batches of n; rows of the finished are dropped (B0)
    plain       continuous batching without drafts (B1)
    fixed       the best fixed number of drafts (B2)
    blind       the shipped budget without entropy (B3)
    shuffled    with the entropy of others, a placebo (B5)
    oracle      drafts exactly what will be accepted (B6)
    policy      what ships, from the own text alone: prompts come again
    cap N       what ships, without drafts for sequences above N nats (`--caps`)

`--sides` leaves out all but those named and the policy; `--skip-loops` leaves out requests whose
answers repeat themselves, as a small model's often do, and where guessing is no art; with
`--long-tokens 2048` one answer of a cell is as long. Ctrl-C ends a run early: what was measured by
then is shown.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import common
from drafts import read_prompts
from lockstep import MAX_ANSWER_TOKENS, Job, Way, make_jobs, run
from policy_drafters import (
    ENTROPY_EDGES_NATS,
    CountingDrafter,
    FixedDrafter,
    NoEntropyDrafter,
    OracleDrafter,
    ShuffledDrafter,
)
from policy_tables import entropy_table, table

from headrace.backends.base import Backend, Capabilities
from headrace.runtime.drafting.drafter import DEFAULT_DRAFT_TOKENS, Drafter

FIXED_LENGTHS = (1, 2, 3, 4, 6, 8)
SIDES = ("static", "dropping", "plain", "fixed", "blind", "shuffled", "oracle")
BATCHES = {"static": Way(in_batches=True, keeps_rows=True), "dropping": Way(in_batches=True)}
MOST_SIDES = 4 + len(FIXED_LENGTHS)  # at once, which is while tuning; caps come on top
Drafters = dict[str, Drafter | None]
Loaded = tuple[Backend, Capabilities]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("package", type=Path, metavar="DIR")
    parser.add_argument("prompts_files", type=Path, nargs="+", metavar="PROMPTS.jsonl")
    parser.add_argument("--sequences", type=common.numbers, default=(1, 4, 16), metavar="LIST")
    parser.add_argument("--requests", type=int, default=2, help="of a cell, for each sequence")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--caps", nargs="*", type=float, default=[], metavar="NATS")
    parser.add_argument("--sides", nargs="*", default=SIDES, choices=SIDES, metavar="SIDE")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="CATEGORY", help="that are measured"
    )
    parser.add_argument("--skip-loops", action="store_true")
    parser.add_argument("--long-tokens", type=int, default=0, help="of one answer among the others")
    args = parser.parse_args()
    prompts: dict[str, list[list[int]]] = {}
    for file in args.prompts_files:
        prompts |= read_prompts(file, args.package, 64)
    longest = max(len(ids) for found in prompts.values() for ids in found)
    loaded = common.load_backend(
        args.package,
        slots=max(args.sequences) * (MOST_SIDES + len(args.caps)),
        context_tokens=longest + max(MAX_ANSWER_TOKENS, args.long_tokens),
        threads=args.threads,
    )
    cells: list[dict[str, Any]] = []
    tuned: dict[int, tuple[Drafters, int]] = {}
    with suppress(KeyboardInterrupt):
        for number, count in itertools.product(range(args.rounds), args.sequences):
            if count not in tuned:
                tuned[count] = tune(loaded, prompts, count, args.requests, args.caps, args.sides)
            drafters, best = tuned[count]
            for category, ids in prompts.items():
                if args.only and category not in args.only:
                    continue
                jobs = make_jobs(ids[::2], count * args.requests, seed=number + 1)
                if args.skip_loops:
                    jobs = without_loops(loaded, jobs, count)
                if not jobs:
                    continue
                if args.long_tokens:
                    jobs[0] = replace(jobs[0], num_tokens=args.long_tokens)
                sides = measure(loaded, drafters, jobs, count, args.sides)
                cell = {"sequences": count, "category": category, "requests": len(jobs)}
                cells.append({**cell, "best_fixed": best, "sides": sides})
                speeds = {name: round(side["tok_s"]) for name, side in sides.items()}
                print(f"{count} x {category}, tok/s: {speeds}", file=sys.stderr)
    if not cells:
        raise SystemExit("nothing was measured")
    bins = {count: drafts_by_entropy(drafters["policy"]) for count, (drafters, _) in tuned.items()}
    lines = [*table(cells), "", *entropy_table(bins)]
    common.show(common.report({"cells": cells, "drafts": bins}), lines, as_json=args.json)


def without_loops(loaded: Loaded, jobs: list[Job], count: int) -> list[Job]:
    written = run(loaded, {"plain": Way()}, jobs, count)["plain"].written
    return [job for i, job in enumerate(jobs) if not loops(written[i])]


def loops(token_ids: Sequence[int]) -> bool:
    """Whether more than half of the text's runs of four tokens have been there before."""
    runs = list(zip(*(token_ids[i:] for i in range(4)), strict=False))
    return len(set(runs)) < 0.5 * len(runs)


def tune(
    loaded: Loaded,
    prompts: dict[str, list[list[int]]],
    count: int,
    requests: int,
    caps: Sequence[float],
    sides: Sequence[str],
) -> tuple[Drafters, int]:
    """Drafters that have seen the tuning prompts, and the best fixed length on them."""
    drafters: Drafters = {
        "plain": None,
        "blind": NoEntropyDrafter(DEFAULT_DRAFT_TOKENS),
        "shuffled": ShuffledDrafter(DEFAULT_DRAFT_TOKENS),
        "policy": CountingDrafter(DEFAULT_DRAFT_TOKENS),
        **{f"cap {cap:g}": CountingDrafter(DEFAULT_DRAFT_TOKENS, cap) for cap in caps},
    }
    drafters = {
        name: drafter for name, drafter in drafters.items() if name not in SIDES or name in sides
    }
    one_each = [ids[1] for ids in prompts.values() if len(ids) > 1]
    jobs = make_jobs(one_each, max(len(one_each), count * requests), seed=0)
    ways = {name: Way(drafter) for name, drafter in drafters.items()}
    if "fixed" in sides:
        ways |= {f"{n} drafts": Way(FixedDrafter(n)) for n in FIXED_LENGTHS}
    found = run(loaded, ways, jobs, count)
    if "fixed" not in sides:
        return drafters, 0
    best = max(FIXED_LENGTHS, key=lambda n: found[f"{n} drafts"].tok_s)
    return {**drafters, "fixed": FixedDrafter(best)}, best


def measure(
    loaded: Loaded, drafters: Drafters, jobs: list[Job], count: int, sides: Sequence[str]
) -> dict[str, Any]:
    """All chosen sides on the same jobs; compares what they write."""
    ways = {name: Way(drafter) for name, drafter in drafters.items()}
    ways |= {name: way for name, way in BATCHES.items() if name in sides}
    if "oracle" in sides:
        answers: dict[tuple[int, ...], list[int]] = {}
        written = run(loaded, {"plain": Way()}, jobs, count)["plain"].written
        for i, job in enumerate(jobs):
            answers[job.prompt_ids] = max(answers.get(job.prompt_ids, []), written[i], key=len)
        ways["oracle"] = Way(OracleDrafter(DEFAULT_DRAFT_TOKENS, answers))
    outcomes = run(loaded, ways, jobs, count)
    for name, outcome in outcomes.items():
        assert outcome.written == outcomes["policy"].written, f"{name} changed an answer"
    return {
        name: {
            "tok_s": outcome.tok_s,
            "mean_latency_s": mean(outcome.latencies_s),
            "median_latency_s": median(outcome.latencies_s),
            "p99_window_ms": common.percentile(outcome.window_ms, 99),
            "p99_request_ms": common.percentile(outcome.request_ms, 99),
            "steps_per_token": outcome.num_steps / outcome.num_tokens,
        }
        for name, outcome in outcomes.items()
    }


def drafts_by_entropy(drafter: Drafter | None) -> list[dict[str, int]]:
    assert isinstance(drafter, CountingDrafter)
    bins = range(len(ENTROPY_EDGES_NATS) + 1)
    return [{"drafted": drafter.drafted[b], "accepted": drafter.accepted[b]} for b in bins]


if __name__ == "__main__":
    main()
