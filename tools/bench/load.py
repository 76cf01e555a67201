"""Requests that come at random times: how long they wait, and whether any is lost.

    python tools/bench/load.py DIR PROMPTS.jsonl [--loads 0.5,0.8,0.95,4] [--seconds 60] [--json]

Arrivals are Poisson, at a share of the capacity, which is measured first: all slots busy, one
request after another. Lengths of answers are drawn as chats have them (log-normal, median 64,
sigma 1, from 16 to 512), greedy. What the bounded queue refuses is counted as refused; everything
that was accepted must come to its end, with the tokens that its prompt always gets, and start
within `QUANTUM_STEPS` steps for each round of slots that may wait before it. Exits with 1 if not.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
import psutil
from drafts import read_prompts
from lockstep import Job, make_jobs

from headrace.runtime import Runtime
from headrace.runtime.errors import QueueFullError
from headrace.runtime.scheduling.fairness import QUANTUM_STEPS

SLOTS = 16


@dataclass(slots=True)
class Served:
    """One request: seconds from its arrival on, and steps that it waited."""

    job: Job
    refused: bool = False
    first_s: float = math.nan
    last_s: float = math.nan
    waited_steps: int = 0
    token_ids: list[int] = field(default_factory=list)

    @property
    def token_ms(self) -> float:
        return 1000 * (self.last_s - self.first_s) / max(len(self.token_ids) - 1, 1)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("package", type=Path, metavar="DIR")
    parser.add_argument("prompts_file", type=Path, metavar="PROMPTS.jsonl")
    parser.add_argument("--loads", type=_shares, default=(0.5, 0.8, 0.95, 4.0), metavar="LIST")
    parser.add_argument("--seconds", type=float, default=60.0, help="that requests come for")
    parser.add_argument("--max-waiting", type=int, default=128)
    parser.add_argument("--max-draft-tokens", type=int, default=None)
    args = parser.parse_args()
    prompts = [
        ids for found in read_prompts(args.prompts_file, args.package, 2).values() for ids in found
    ]
    options = {
        "max_sequences": SLOTS,
        "max_waiting": args.max_waiting,
        "num_threads": args.threads,
        "max_draft_tokens": args.max_draft_tokens,
        # Prompts come again, and are to be computed again and guessed from their own text.
        "prefix_cache_bytes": 0,
        "draft_pool_tokens": 0,
    }
    with Runtime.load(args.package, **options) as runtime:
        per_second = asyncio.run(measure_capacity(runtime, make_jobs(prompts, 3 * SLOTS, seed=1)))
        cells = []
        for share in args.loads:
            served = asyncio.run(run(runtime, prompts, share * per_second, args.seconds))
            cells.append({"load": share, **summary(runtime, served)})
    lines = [f"capacity {per_second:.2f} requests/s with {SLOTS} slots", *table(cells)]
    passed = all(cell["failures"] == [] for cell in cells)
    lines += [failure for cell in cells for failure in cell["failures"]]
    figures = common.report({"capacity_requests_s": per_second, "cells": cells, "passed": passed})
    common.show(figures, lines, as_json=args.json)
    raise SystemExit(0 if passed else 1)


def _shares(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


async def measure_capacity(runtime: Runtime, jobs: list[Job]) -> float:
    """Requests a second where there is always one to take a free slot."""
    start = time.perf_counter()
    options: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    await asyncio.gather(
        *(runtime.agenerate(j.prompt_ids, max_new_tokens=j.num_tokens, **options) for j in jobs)
    )
    return len(jobs) / (time.perf_counter() - start)


async def run(
    runtime: Runtime, prompts: list[list[int]], rate: float, seconds: float
) -> list[Served]:
    """Everything that came within that time, after the last of it has ended."""
    rng = random.Random(2)
    jobs = make_jobs(prompts, math.ceil(2 * rate * seconds) + 16, seed=2)
    tasks: list[asyncio.Task[Served]] = []
    start = due = time.perf_counter()
    while (due := due + rng.expovariate(rate)) < start + seconds:
        await asyncio.sleep(max(due - time.perf_counter(), 0.0))
        tasks.append(asyncio.create_task(serve(runtime, jobs[len(tasks)])))
    return list(await asyncio.gather(*tasks))


async def serve(runtime: Runtime, job: Job) -> Served:
    served = Served(job)
    start, step = time.perf_counter(), newest_step(runtime)
    options: dict[str, Any] = {
        "max_new_tokens": job.num_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    try:
        async for delta in runtime.astream(job.prompt_ids, **options):
            served.last_s = time.perf_counter() - start
            if not served.token_ids:
                served.first_s = served.last_s
                served.waited_steps = newest_step(runtime) - step
            served.token_ids += delta.token_ids
    except QueueFullError:
        served.refused = True
    return served


def newest_step(runtime: Runtime) -> int:
    return runtime._engine.steps[-1].step_id


def summary(runtime: Runtime, requests: list[Served]) -> dict[str, Any]:
    served = [one for one in requests if not one.refused]
    steps = max((one.waited_steps for one in served), default=0)
    engine = runtime._engine
    rounds = 1 + math.ceil(engine.config.max_waiting / SLOTS)
    failures = []
    if lost := sum(len(one.token_ids) != one.job.num_tokens for one in served):
        failures.append(f"{lost} of {len(served)} requests did not come to their end")
    if changed := sum(one.token_ids != ids for one, ids in with_longest(served)):
        failures.append(f"{changed} answers differ from others to the same prompt")
    if steps > rounds * QUANTUM_STEPS:
        failures.append(f"a request waited {steps} steps, over {rounds} x {QUANTUM_STEPS}")
    if engine.num_running or engine.num_waiting:
        failures.append("something is still running")
    engine.check_integrity()
    return {
        "requests": len(requests),
        "refused": len(requests) - len(served),
        "first_token_s": [common.percentile([one.first_s for one in served], p) for p in (50, 99)],
        "token_ms": [common.percentile([one.token_ms for one in served], p) for p in (50, 99)],
        "most_waited_steps": steps,
        "rss_bytes": psutil.Process().memory_info().rss,
        "failures": failures,
    }


def with_longest(served: list[Served]) -> list[tuple[Served, list[int]]]:
    """Each with as many tokens of the longest answer to its prompt: greedy, so the same."""
    longest: dict[tuple[int, ...], list[int]] = {}
    for one in served:
        longest[one.job.prompt_ids] = max(
            longest.get(one.job.prompt_ids, []), one.token_ids, key=len
        )
    return [(one, longest[one.job.prompt_ids][: len(one.token_ids)]) for one in served]


def table(cells: list[dict[str, Any]]) -> list[str]:
    titles = (
        "load",
        "requests",
        "refused",
        "first token s",
        "P99",
        "token ms",
        "P99",
        "most steps waited",
        "RSS MiB",
    )
    lines = [" ".join(f"{title:>{max(len(title), 8)}}" for title in titles)]
    for c in cells:
        values = (
            f"{c['load']:g}",
            c["requests"],
            c["refused"],
            *(f"{v:.2f}" for v in c["first_token_s"]),
            *(f"{v:.1f}" for v in c["token_ms"]),
            c["most_waited_steps"],
            c["rss_bytes"] >> 20,
        )
        lines.append(
            " ".join(f"{v:>{max(len(t), 8)}}" for v, t in zip(values, titles, strict=True))
        )
    return lines


if __name__ == "__main__":
    main()
