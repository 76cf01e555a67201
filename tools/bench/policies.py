"""Who gets the rows of a step: the shipped policy against others, on one engine and its kernels.

    python tools/bench/policies.py DIR PROMPTS.jsonl [...] [--sequences 1,4,16] [--requests 2] [...]

A line of a file is `{"category": ..., "turns": [...]}` as in Spec-Bench;
editing_prompts.jsonl beside this script has work on a given text. A cell is one category
with n sequences in flight; all its requests are there from the start, output lengths are drawn as
chats have them (log-normal, median 64, sigma 1, from 16 to 512), greedy, and every side must write
the same tokens. Prompts with an odd number tune (the best fixed length, and what drafters learn);
those with an even number are reported. Sides take turns within a cell, each round in another order;
ratios are paired by cell and round, with a 95% interval of their geometric mean over cells.

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
answers repeat themselves, as a small model's often do, and where guessing is no art. Ctrl-C ends a
run early: what was measured by then is shown.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import common
from drafts import read_prompts
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
from headrace.runtime.config import EngineConfig, GenerationConfig
from headrace.runtime.core import KvRelease, StepPlan
from headrace.runtime.drafting.drafter import DEFAULT_DRAFT_TOKENS, Drafter
from headrace.runtime.engine import Engine

FIXED_LENGTHS = (1, 2, 3, 4, 6, 8)
WINDOW_TOKENS = 8
SIDES = ("static", "dropping", "plain", "fixed", "blind", "shuffled", "oracle")
Drafters = dict[str, Drafter | None]


@dataclass(frozen=True, slots=True)
class Job:
    prompt_ids: tuple[int, ...]
    num_tokens: int


@dataclass(slots=True)
class Outcome:
    """Of one side in one cell."""

    seconds: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0
    written: dict[int, list[int]] = field(default_factory=dict)
    latencies_s: list[float] = field(default_factory=list)
    window_ms: list[float] = field(default_factory=list)  # a token, over windows of 8 tokens
    request_ms: list[float] = field(default_factory=list)  # a token, over each answer

    @property
    def tok_s(self) -> float:
        return self.num_tokens / self.seconds


class NoText:
    """Text costs all sides the same."""

    stopped = None

    def push(self, token_ids: object) -> str:
        return ""

    def finish(self) -> str:
        return ""

    def take_calls(self) -> tuple[()]:
        return ()


class Loaded:
    """One loaded backend that many engines use, one after another."""

    def __init__(self, backend: Backend, caps: Capabilities) -> None:
        self._backend, self._caps = backend, caps
        self.max_slots = caps.max_slots
        self.submit, self.collect = backend.submit, backend.collect

    def load(self) -> Capabilities:
        plan = StepPlan(0, (), tuple(KvRelease(slot) for slot in range(self._caps.max_slots)))
        self._backend.collect(self._backend.submit(plan))
        return self._caps

    def close(self) -> None:
        """The backend goes on."""


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("package", type=Path, metavar="DIR")
    parser.add_argument("prompts_files", type=Path, nargs="+", metavar="PROMPTS.jsonl")
    parser.add_argument("--sequences", type=common.numbers, default=(1, 4, 16), metavar="LIST")
    parser.add_argument("--requests", type=int, default=2, help="of a cell, for each sequence")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--caps", nargs="*", type=float, default=[], metavar="NATS")
    parser.add_argument("--sides", nargs="*", default=SIDES, choices=SIDES, metavar="SIDE")
    parser.add_argument("--only", nargs="*", default=[], metavar="CATEGORY")
    parser.add_argument("--skip-loops", action="store_true")
    args = parser.parse_args()
    prompts: dict[str, list[list[int]]] = {}
    for file in args.prompts_files:
        prompts |= read_prompts(file, args.package, 64)
    prompts = {c: p for c, p in prompts.items() if not args.only or c in args.only}
    loaded = Loaded(
        *common.load_backend(
            args.package, slots=max(args.sequences), context_tokens=8192, threads=args.threads
        )
    )
    cells: list[dict[str, Any]] = []
    tuned: dict[int, tuple[Drafters, int]] = {}
    work: dict[tuple[int, str], list[Job]] = {}
    with suppress(KeyboardInterrupt):
        for number, count in itertools.product(range(args.rounds), args.sequences):
            if count not in tuned:
                tuned[count] = tune(loaded, prompts, count, args.requests, args.caps, args.sides)
            drafters, best = tuned[count]
            for category, ids in prompts.items():
                if (count, category) not in work:
                    jobs = make_jobs(ids[::2], count * args.requests, seed=1)
                    work[count, category] = without_loops(loaded, jobs) if args.skip_loops else jobs
                if not (jobs := work[count, category]):
                    continue
                sides = measure(loaded, drafters, jobs, count, number, args.sides)
                cell = {"sequences": count, "category": category, "requests": len(jobs)}
                cells.append({**cell, "best_fixed": best, "sides": sides})
                speeds = {name: round(side["tok_s"]) for name, side in sides.items()}
                print(f"{count} x {category}, tok/s: {speeds}", file=sys.stderr)
    if not cells:
        raise SystemExit("nothing was measured")
    bins = {count: drafts_by_entropy(drafters["policy"]) for count, (drafters, _) in tuned.items()}
    lines = [*table(cells), "", *entropy_table(bins)]
    common.show(common.report({"cells": cells, "drafts": bins}), lines, as_json=args.json)


def make_jobs(prompts: Sequence[Sequence[int]], count: int, seed: int) -> list[Job]:
    rng = random.Random(seed)
    lengths = [min(max(round(rng.lognormvariate(math.log(64), 1)), 16), 512) for _ in range(count)]
    return [Job(tuple(prompts[i % len(prompts)]), n) for i, n in enumerate(lengths)]


def without_loops(loaded: Loaded, jobs: list[Job]) -> list[Job]:
    written = run(loaded, None, jobs, loaded.max_slots).written
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
    for drafter in drafters.values():
        run(loaded, drafter, jobs, count)
    if "fixed" not in sides:
        return drafters, 0
    speeds = {n: run(loaded, FixedDrafter(n), jobs, count).tok_s for n in FIXED_LENGTHS}
    best = max(speeds, key=speeds.__getitem__)
    return {**drafters, "fixed": FixedDrafter(best)}, best


def measure(
    loaded: Loaded,
    drafters: Drafters,
    jobs: list[Job],
    count: int,
    number: int,
    chosen: Sequence[str],
) -> dict[str, Any]:
    """All chosen sides on the same jobs; compares what they write."""
    plain = run(loaded, None, jobs, count)  # warms up, and tells the oracle
    answers: dict[tuple[int, ...], list[int]] = {}
    for i, job in enumerate(jobs):
        longest = answers.get(job.prompt_ids, [])
        answers[job.prompt_ids] = max(longest, plain.written[i], key=len)
    sides: Drafters = dict(drafters)
    if "oracle" in chosen:
        sides["oracle"] = OracleDrafter(DEFAULT_DRAFT_TOKENS, answers)
    names = [*(name for name in ("static", "dropping") if name in chosen), *sides]
    random.Random(number).shuffle(names)
    found: dict[str, Any] = {}
    for name in names:
        time.sleep(common.SETTLE_S)
        if name in ("static", "dropping"):
            outcome = run_static(loaded, jobs, count, keep_rows=name == "static")
        else:
            outcome = run(loaded, sides[name], jobs, count)
        assert outcome.written == plain.written, f"{name} changed an answer"
        found[name] = {
            "tok_s": outcome.tok_s,
            "mean_latency_s": mean(outcome.latencies_s),
            "p99_window_ms": common.percentile(outcome.window_ms, 99),
            "p99_request_ms": common.percentile(outcome.request_ms, 99),
            "steps_per_token": outcome.num_steps / outcome.num_tokens,
        }
    return found


def run(loaded: Loaded, drafter: Drafter | None, jobs: Sequence[Job], count: int) -> Outcome:
    """All jobs at once, `count` of them in flight."""
    config = EngineConfig(max_sequences=count, max_draft_tokens=0, prefix_cache_bytes=0)
    engine = Engine(loaded, lambda _: NoText(), (), config, drafter=drafter)
    outcome, number_of = Outcome(), {}
    times: dict[int, list[float]] = {}
    for i, job in enumerate(jobs):
        request = engine.prepare(job.prompt_ids, GenerationConfig(max_new_tokens=job.num_tokens))
        number_of[request.request_id] = i
        outcome.written[i], times[i] = [], []
        engine.add(request)
    start = time.perf_counter()
    while engine.has_work:
        events = engine.step()
        now = time.perf_counter() - start
        for event in events:
            assert event.delta is not None, event.error
            i = number_of[event.request.request_id]
            outcome.written[i] += event.delta.token_ids
            times[i] += [now] * len(event.delta.token_ids)
    outcome.seconds = time.perf_counter() - start
    outcome.num_tokens = sum(map(len, outcome.written.values()))
    outcome.num_steps = sum(step.num_rows > 0 for step in engine.steps)
    outcome.latencies_s = [stamps[-1] for stamps in times.values()]
    for stamps in times.values():
        outcome.request_ms.append(1000 * (stamps[-1] - stamps[0]) / (len(stamps) - 1))
        spans = zip(stamps, stamps[WINDOW_TOKENS:], strict=False)
        outcome.window_ms += [1000 * (last - first) / WINDOW_TOKENS for first, last in spans]
    return outcome


def run_static(loaded: Loaded, jobs: Sequence[Job], count: int, *, keep_rows: bool) -> Outcome:
    """Batch after batch; with `keep_rows` all run as long as the longest, and are done with it."""
    total = Outcome()
    for first in range(0, len(jobs), count):
        batch = list(jobs[first : first + count])
        longest = max(job.num_tokens for job in batch)
        asked = [Job(j.prompt_ids, longest if keep_rows else j.num_tokens) for j in batch]
        part = run(loaded, None, asked, count)
        for i, job in enumerate(batch):
            total.written[first + i] = part.written[i][: job.num_tokens]
            total.latencies_s.append(
                total.seconds + (part.seconds if keep_rows else part.latencies_s[i])
            )
        total.seconds += part.seconds
        total.num_tokens += sum(job.num_tokens for job in batch)
        total.num_steps += part.num_steps
        total.window_ms += part.window_ms
        total.request_ms += part.request_ms
    return total


def drafts_by_entropy(drafter: Drafter | None) -> list[dict[str, int]]:
    assert isinstance(drafter, CountingDrafter)
    bins = range(len(ENTROPY_EDGES_NATS) + 1)
    return [{"drafted": drafter.drafted[b], "accepted": drafter.accepted[b]} for b in bins]


if __name__ == "__main__":
    main()
