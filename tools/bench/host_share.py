"""Time outside the model: decoding through `Runtime` against a bare loop of the same run calls.

    python tools/bench/host_share.py DIR [--rows 1,4,16] [--depths 1,2] [--rounds 5] [--json]

Each call of the session is made once more with what it was given, as a bare loop would: it computes
and writes the same, and a spell of a slow machine hits both. Scheduling, sampling, detokenizing,
binding and handing over to another thread lie between the calls of the runtime alone. Where the
graph computes probabilities for sampling the bare calls do too, as they are the same calls; `graph`
is what those cost in the graph, against calls without them. With several `--depths` a runtime of
each `pipeline_depth` takes its turn in every round, and `gain` is its steps a second against those
of the first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import common

from headrace.backends.base import StepOutput
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
    """For each depth medians over the steps of all rounds; `outside_share` is 1 - bare / whole of
    each step, `counted_share` what the engine's own step log says."""
    seen: dict[int, list[PairedStep]] = {depth: [] for depth in runtimes}
    shares: dict[int, list[float]] = {depth: [] for depth in runtimes}
    pairs = {depth: PairedCalls(runtime) for depth, runtime in runtimes.items()}
    for number in range(rounds + 1):
        for depth, runtime in runtimes.items():
            time.sleep(common.SETTLE_S)
            paired, counted_share = _decode(
                runtime, pairs[depth], rows, options, steps, seed=number
            )
            if number:  # the first round warms up
                seen[depth] += paired
                shares[depth].append(counted_share)
    for pair in pairs.values():
        pair.end()
    first = next(iter(seen.values()))
    return [
        {
            "depth": depth,
            "step_ms": median(step.step_ms for step in taken),
            "bare_ms": median(step.bare_ms for step in taken),
            "outside_share": median(1 - step.bare_ms / step.step_ms for step in taken),
            "counted_share": median(shares[depth]),
            "graph_share": median((s.bare_ms - s.plain_ms) / s.step_ms for s in taken),
            "gain": median(a.step_ms / b.step_ms for a, b in zip(first, taken, strict=True)),
        }
        for depth, taken in seen.items()
    ]


class PairedStep(NamedTuple):
    """A step of one call. `step_ms`: from where the call before ended to where this one does;
    `model_ms`: of it, inside the call; `bare_ms`: the same call at once again; `plain_ms`: and once
    more without probabilities."""

    num_rows: int
    num_tokens: int
    step_ms: float
    model_ms: float
    bare_ms: float
    plain_ms: float


class PairedCalls:
    """Makes each call of a runtime's backend twice, until `end`."""

    def __init__(self, runtime: Runtime) -> None:
        backend: Any = runtime._engine._backend
        if isinstance(backend, ThreadedBackend):
            backend = backend._backend
        self._backend, self._run_call = backend, backend._run_call
        self._end_s = time.perf_counter()
        self.steps: list[PairedStep] = []
        backend._run_call = self._run_twice

    def end(self) -> None:
        self._backend._run_call = self._run_call

    def _run_twice(self, rows: Sequence[Row]) -> StepOutput:
        output: StepOutput = self._run_call(rows)
        end_s = time.perf_counter()
        step_ms = (end_s - self._end_s) * 1e3
        bare_ms = plain_ms = self._bare_ms(rows)
        if any(row.inverse_temperature for row in rows):
            plain_ms = self._bare_ms([row._replace(inverse_temperature=0.0) for row in rows])
        num_tokens = sum(len(row.tokens) for row in rows)
        self.steps.append(
            PairedStep(len(rows), num_tokens, step_ms, output.model_ms, bare_ms, plain_ms)
        )
        self._end_s = time.perf_counter()
        # What the engine counts as its own time is to be its own.
        return output._replace(model_ms=output.model_ms + (self._end_s - end_s) * 1e3)

    def _bare_ms(self, rows: Sequence[Row]) -> float:
        bound = self._backend._bound_step(rows)
        bound.write(rows)
        start = time.perf_counter()
        bound.run()
        return (time.perf_counter() - start) * 1e3


def _decode(
    runtime: Runtime,
    calls: PairedCalls,
    rows: int,
    options: dict[str, Any],
    steps: int,
    seed: int,
) -> tuple[list[PairedStep], float]:
    """The last `steps` steps in which all rows decode, and the share of them that the engine
    counted as its own.

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
    for _ in range(steps + 2):
        for stream in deltas:
            next(stream)
    for request in requests:
        request.cancel()
    for request in requests:
        request.result()
    taken = [step for step in calls.steps if step.num_rows == rows == step.num_tokens][-steps:]
    calls.steps.clear()
    records = [step for step in runtime.steps if step.num_rows == rows == step.num_tokens][-steps:]
    host_ms = sum(record.host_ms for record in records)
    return taken, host_ms / (host_ms + sum(step.model_ms for step in taken))


if __name__ == "__main__":
    main()
