"""Time outside the model: decoding through `Runtime` against a bare loop of the same run calls.

    python tools/bench/host_share.py DIR [--rows 1,4,16] [--depths 1,2] [--rounds 5] [--json]

A round decodes `--steps` steps with all sequences running, then makes as many bare calls of the
same session, bound to the same buffers, at the length the sequences had half way. Scheduling,
sampling, detokenizing, binding and handing over to another thread are in the first only. Where the
graph computes probabilities for sampling the bare calls do too, as they are the same calls;
`graph` is what those cost in the graph, against calls without them. With several `--depths` a
runtime of each `pipeline_depth` takes its turn in every round, and `gain` is its steps a second
against those of the first.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import common

from headrace.runtime import Runtime
from headrace.runtime.core import Row
from headrace.runtime.pipeline import ThreadedBackend

# Ordinary text: after random tokens a model is undecided, and truncation has more to look at.
STORY = (
    "{}. The keeper of the lighthouse wrote down the weather every evening: wind, clouds, and the "
    "ships that went by. On the last page of the book there was room for one more line, and"
)
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8, top_p 0.95": {"temperature": 0.8, "top_p": 0.95, "seed": 1},
}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("package", type=Path, metavar="DIR")
    parser.add_argument("--rows", type=common.numbers, default=(1, 4, 16), metavar="LIST")
    parser.add_argument("--depths", type=common.numbers, default=(1,), metavar="LIST")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    cases = []
    with ExitStack() as loaded:
        runtimes = {depth: loaded.enter_context(_load(args, depth)) for depth in args.depths}
        for sampling, options in SAMPLING.items():
            for rows in args.rows:
                for case in measure(runtimes, rows, options, args.steps, args.rounds):
                    cases.append({"sampling": sampling, "rows": rows, **case})
        name = runtimes[args.depths[0]].capabilities.name
    titles = f"{'step ms':>10}{'bare ms':>10}{'outside':>10}{'own count':>11}{'graph':>8}"
    lines = [f"{'':30}{'rows':>6}{'depth':>7}{titles}{'gain':>7}"]
    for c in cases:
        lines.append(
            f"{c['sampling']:30}{c['rows']:6}{c['depth']:7}{c['step_ms']:10.3f}{c['bare_ms']:10.3f}"
            f"{c['outside_share']:10.1%}{c['counted_share']:11.1%}{c['graph_share']:8.1%}"
            f"{c['gain']:7.2f}"
        )
    figures = common.report({"backend": name, "steps": args.steps, "cases": cases})
    common.show(figures, lines, as_json=args.json)


def _load(args: argparse.Namespace, depth: int) -> Runtime:
    return Runtime.load(
        args.package,
        max_sequences=max(args.rows),
        num_threads=args.threads,
        pipeline_depth=depth,
        max_draft_tokens=0,  # a step is to be one token of each
    )


def measure(
    runtimes: dict[int, Runtime], rows: int, options: dict[str, Any], steps: int, rounds: int
) -> list[dict[str, float]]:
    """For each depth medians over the rounds; `outside_share` is 1 - bare / whole of each round,
    `counted_share` what the engine's own step log says; `graph_share` what probabilities cost."""
    inverse = 1 / options["temperature"] if options["temperature"] else 0.0
    seen: dict[int, list[Round]] = {depth: [] for depth in runtimes}
    for number in range(rounds + 1):
        for depth, runtime in runtimes.items():
            time.sleep(common.SETTLE_S)
            step_ms, counted_share, past_lens = _decode(runtime, rows, options, steps, seed=number)
            bare_ms = _bare(runtime, past_lens, steps, inverse)
            plain_ms = _bare(runtime, past_lens, steps, 0.0) if inverse else bare_ms
            if number:  # the first round warms up
                seen[depth].append(Round(step_ms, bare_ms, plain_ms, counted_share))
    first = next(iter(seen.values()))
    return [
        {
            "depth": depth,
            "step_ms": median(r.step_ms for r in taken),
            "bare_ms": median(r.bare_ms for r in taken),
            "outside_share": median(1 - r.bare_ms / r.step_ms for r in taken),
            "counted_share": median(r.counted_share for r in taken),
            "graph_share": median((r.bare_ms - r.plain_ms) / r.step_ms for r in taken),
            "gain": median(a.step_ms / b.step_ms for a, b in zip(first, taken, strict=True)),
        }
        for depth, taken in seen.items()
    ]


class Round(NamedTuple):
    """Wall ms a step, whole, as a bare call, and as one that computes no probabilities."""

    step_ms: float
    bare_ms: float
    plain_ms: float
    counted_share: float


def _decode(
    runtime: Runtime, rows: int, options: dict[str, Any], steps: int, seed: int
) -> tuple[float, float, list[int]]:
    """Wall ms a step while all rows decode, the share of it that the engine counted as its own, and
    the tokens that each sequence had half way.

    This thread reads every answer, as a server would. The one that started last sets the pace: what
    the others wrote is there already.
    """
    length = steps + 16 * rows + 32  # others go on while the last prompt is read
    requests = [
        runtime.submit(
            STORY.format(seed * rows + row), max_new_tokens=length, ignore_eos=True, **options
        )
        for row in range(rows)
    ]
    deltas = [iter(request) for request in requests]
    for stream in deltas:
        next(stream)
    start = time.perf_counter()
    for _ in range(steps):
        for stream in deltas:
            next(stream)
    wall_ms = (time.perf_counter() - start) * 1e3
    for request in requests:
        request.cancel()
    ends = [request.result() for request in requests]
    past_lens = [end.prompt_tokens + end.completion_tokens - steps // 2 for end in ends]
    records = [step for step in runtime.steps if step.num_rows == rows == step.num_tokens][-steps:]
    model_ms = sum(record.model_ms for record in records)
    host_ms = sum(record.host_ms for record in records)
    return wall_ms / steps, host_ms / (host_ms + model_ms), past_lens


def _bare(runtime: Runtime, past_lens: list[int], steps: int, inverse_temperature: float) -> float:
    """Wall ms of one run call with the binding that the engine's decode steps use."""
    backend: Any = runtime._engine._backend
    if isinstance(backend, ThreadedBackend):
        backend = backend._backend
    rows = [
        Row(slot, slot, past_len, (slot + 1,), 1, inverse_temperature)
        for slot, past_len in enumerate(past_lens)
    ]
    bound = backend._bound_step(rows)
    bound.write(rows)
    start = time.perf_counter()
    for _ in range(steps):
        bound.run()
    return (time.perf_counter() - start) * 1e3 / steps


if __name__ == "__main__":
    main()
