"""How near decoding one sequence comes to what reading the weights alone takes.

    python tools/bench/limit.py DIR... [--contexts 128,1024] [--rounds 5] [--json]

A step has to read every weight and all keys and values of the sequence once. The limit is the time
for that many bytes at the bandwidth that as many threads reach in the same round over a buffer of
the same size: a small buffer would read the cache. 1.00 is a step that takes no longer.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import common
import numpy as np

from headrace.backends.base import Backend
from headrace.runtime.commands.bench import decode_plan, fill_plans, hardware
from headrace.runtime.core import KvRelease, StepPlan
from headrace.runtime.manifest import TargetInfo, read_manifest

DECODE_STEPS = 8  # timed together in one round
READS = 4


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("packages", nargs="+", type=common.named_package, metavar="DIR")
    parser.add_argument("--contexts", type=common.numbers, default=(128, 1024))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    threads = args.threads or hardware()["usable_cores"]
    cases = [
        case
        for name, folder in args.packages
        for case in measure_package(name, folder, args.contexts, threads, args.rounds)
    ]
    lines = [f"{'':28}{'MB a step':>10}{'read GB/s':>10}{'step ms':>9}{'limit ms':>9}{'share':>7}"]
    for case in cases:
        lines.append(
            f"{case['package'] + ', context ' + str(case['context']):28}"
            f"{case['bytes'] / 1e6:10.1f}{case['read_gb_s']:10.1f}{case['step_ms']:9.2f}"
            f"{case['limit_ms']:9.2f}{case['share']:7.2f}"
        )
    figures = common.report({"threads": threads, "cases": cases})
    common.show(figures, lines, as_json=args.json)


def measure_package(
    name: str, folder: Path, contexts: tuple[int, ...], threads: int, rounds: int
) -> list[dict[str, Any]]:
    """A case for each context: medians over rounds that read and then decode."""
    target = read_manifest(folder).targets[0]
    backend, caps = common.load_backend(
        folder, slots=1, context_tokens=max(contexts) + 1, threads=threads
    )
    cases = []
    for context in contexts:
        num_bytes = bytes_of_step(target, context)
        common.run_plans(backend, list(fill_plans(caps, 1, context)))
        values = common.take_turns(
            {
                "read": lambda size=num_bytes: read_s(size, threads),  # type: ignore[misc]
                "step": lambda context=context: step_s(backend, context),  # type: ignore[misc]
            },
            rounds,
        )
        common.run_plans(backend, [StepPlan(0, (), (KvRelease(0),))])
        cases.append(
            {
                "package": name,
                "context": context,
                "bytes": num_bytes,
                "read_gb_s": num_bytes / median(values["read"]) / 1e9,
                "step_ms": 1e3 * median(values["step"]),
                "limit_ms": 1e3 * median(values["read"]),
                "share": common.pair_ratio(values, "read", "step"),
            }
        )
    backend.close()
    return cases


def bytes_of_step(target: TargetInfo, context: int) -> int:
    """Of weights and of keys and values; an embedding that is only looked up is not read."""
    has_head = any(tensor.name.startswith("lm_head") for tensor in target.tensors)
    looked_up = sum(t.bytes for t in target.tensors if has_head and "embed_tokens" in t.name)
    return target.weight_bytes - looked_up + context * target.kv_cache.bytes_per_token


def step_s(backend: Backend, context: int) -> float:
    plans = [decode_plan(1, context)] * DECODE_STEPS
    common.run_plans(backend, plans[:1])  # what was read between the turns has left the cache
    return common.run_plans(backend, plans) / DECODE_STEPS


def read_s(num_bytes: int, threads: int) -> float:
    """Seconds to read a buffer of this size once with these threads; the fastest of `READS`."""
    size = math.ceil(num_bytes / threads / 4)
    parts = [np.ones(size, np.float32) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        times = []
        for _ in range(READS):
            start = time.perf_counter()
            list(pool.map(np.max, parts))  # gives the interpreter lock back while it reads
            times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    main()
