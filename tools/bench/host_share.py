"""Time outside the model: decoding through `Runtime` against a bare loop of the same run calls.

    python tools/bench/host_share.py DIR [--rows 1,4,16] [--rounds 5] [--json]

A round decodes `--steps` steps with all sequences running, then makes as many bare calls of the
same session, bound to the same buffers, at the length the sequences had half way. Scheduling,
sampling, detokenizing, binding and handing over to another thread are in the first only. Where the
graph computes probabilities for sampling the bare calls do too, as they are the same calls;
`graph` is what those cost in the graph, against calls without them.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import common

from headrace.runtime import Runtime
from headrace.runtime.core import Row

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
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    cases = []
    with Runtime.load(
        args.package,
        max_sequences=max(args.rows),
        num_threads=args.threads,
        max_draft_tokens=0,  # a step is to be one token of each
    ) as runtime:
        for sampling, options in SAMPLING.items():
            for rows in args.rows:
                case = measure(runtime, rows, options, args.steps, args.rounds)
                cases.append({"sampling": sampling, "rows": rows, **case})
        name = runtime.capabilities.name
    titles = f"{'step ms':>10}{'bare ms':>10}{'outside':>10}{'own count':>11}{'graph':>8}"
    lines = [f"{'':30}{'rows':>6}{titles}"]
    for c in cases:
        lines.append(
            f"{c['sampling']:30}{c['rows']:6}{c['step_ms']:10.3f}{c['bare_ms']:10.3f}"
            f"{c['outside_share']:10.1%}{c['counted_share']:11.1%}{c['graph_share']:8.1%}"
        )
    figures = common.report({"backend": name, "steps": args.steps, "cases": cases})
    common.show(figures, lines, as_json=args.json)


def measure(
    runtime: Runtime, rows: int, options: dict[str, Any], steps: int, rounds: int
) -> dict[str, float]:
    """Medians over the rounds; `outside_share` is 1 - bare / whole of each round, and
    `counted_share` what the engine's own step log says; `graph_share` what probabilities cost."""
    whole, bare, counted, graph = [], [], [], []
    for number in range(rounds + 1):
        step_ms, counted_share, past_lens = _decode(runtime, rows, options, steps, seed=number)
        inverse = 1 / options["temperature"] if options["temperature"] else 0.0
        bare_ms = _bare(runtime, past_lens, steps, inverse)
        plain_ms = _bare(runtime, past_lens, steps, 0.0) if inverse else bare_ms
        if number:  # the first round warms up
            whole.append(step_ms)
            bare.append(bare_ms)
            counted.append(counted_share)
            graph.append((bare_ms - plain_ms) / step_ms)
    shares = [1 - b / w for b, w in zip(bare, whole, strict=True)]
    return {
        "step_ms": median(whole),
        "bare_ms": median(bare),
        "outside_share": median(shares),
        "counted_share": median(counted),
        "graph_share": median(graph),
    }


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
