"""Many short requests, some cancelled at random: slots, threads and memory stay where they were.

    python tools/bench/soak.py DIR [--requests 1000] [--json]

Exits with 1 if a slot or a thread is missing, or memory grew by 2% or more after the warm-up.
"""

from __future__ import annotations

import gc
import random
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import common
import psutil

from headrace.runtime import Runtime
from headrace.runtime.worker import RequestHandle

IN_FLIGHT = 24
MAX_GROWTH = 0.02
CANCELLED_SHARE = 0.3


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("package", type=Path, metavar="DIR")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--warm-up", type=int, default=200, help="requests before the first look")
    args = parser.parse_args()
    rng = random.Random(0)
    with Runtime.load(args.package, max_sequences=8, num_threads=args.threads) as runtime:
        run(runtime, rng, args.warm_up)
        before = look(runtime)
        start = time.perf_counter()
        ends = run(runtime, rng, args.requests)
        seconds = time.perf_counter() - start
        after = look(runtime)
    growth = after["rss_bytes"] / before["rss_bytes"] - 1
    same = all(before[key] == after[key] for key in ("free_slots", "threads"))
    passed = same and growth < MAX_GROWTH and sum(ends.values()) == args.requests
    figures = common.report(
        {
            "requests": args.requests,
            "seconds": seconds,
            "ends": dict(ends),
            "before": before,
            "after": after,
            "rss_growth": growth,
            "passed": passed,
        }
    )
    lines = [f"{args.requests} requests in {seconds:.1f} s: {dict(ends)}"]
    lines += [f"{key:12}{before[key]:>14} -> {after[key]}" for key in before]
    lines.append(f"memory grew by {growth:.2%}: {'passed' if passed else 'FAILED'}")
    common.show(figures, lines, as_json=args.json)
    raise SystemExit(0 if passed else 1)


def run(runtime: Runtime, rng: random.Random, count: int) -> Counter[str]:
    """Start `count` random requests, never more than a few at once; how each ended."""
    ends: Counter[str] = Counter()
    running: deque[RequestHandle] = deque()
    for _ in range(count):
        if len(running) >= IN_FLIGHT:
            ends[_end(running.popleft(), rng)] += 1
        running.append(_start(runtime, rng))
    while running:
        ends[_end(running.popleft(), rng)] += 1
    return ends


def look(runtime: Runtime) -> dict[str, Any]:
    """What must not change, once nothing is running. Asserts that the books are in order."""
    engine = runtime._engine
    deadline = time.monotonic() + 10
    while engine.num_running and time.monotonic() < deadline:
        time.sleep(0.01)
    engine.check_integrity()
    gc.collect()
    process = psutil.Process()
    return {
        "free_slots": engine.num_free_slots,
        "threads": process.num_threads(),
        "rss_bytes": process.memory_info().rss,
    }


def _start(runtime: Runtime, rng: random.Random) -> RequestHandle:
    prompt = [rng.randrange(runtime.capabilities.vocab_size) for _ in range(rng.randint(1, 48))]
    return runtime.submit(
        prompt,
        max_new_tokens=rng.randint(1, 24),
        temperature=rng.choice([0.0, 0.8]),
        n=rng.choice([1, 1, 1, 2]),
        ignore_eos=True,
    )


def _end(request: RequestHandle, rng: random.Random) -> str:
    """Wait for a request, or cancel it before its first token or somewhere after."""
    if rng.random() < CANCELLED_SHARE:
        for _, _delta in zip(range(rng.randint(0, 6)), request, strict=False):
            pass
        request.cancel()
    return request.result(60).finish_reason.value


if __name__ == "__main__":
    main()
