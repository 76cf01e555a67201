"""Two or more packages against each other, in turns: prefill and decode on the backend alone.

    python tools/bench/compare.py row=DIR block=DIR [--prefill 128,512] [--rows 1,16]
                                  [--contexts 128,1024,4096] [--rounds 5] [--json]

Ratios are of the first package to each other one, above 1 where the first is faster: the median
over the rounds of what was measured next to each other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import common

from headrace.backends.base import Backend, Capabilities
from headrace.runtime.commands.bench import decode_plan, fill_plans
from headrace.runtime.core import KvRelease, Row, StepPlan

DECODE_STEPS = 4  # timed together in one round

Loaded = Mapping[str, tuple[Backend, Capabilities]]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("packages", nargs="+", type=common.named_package, metavar="NAME=DIR")
    parser.add_argument("--prefill", type=common.numbers, default=(128, 512), metavar="LIST")
    parser.add_argument("--rows", type=common.numbers, default=(1, 16), metavar="LIST")
    parser.add_argument("--contexts", type=common.numbers, default=(128, 1024, 4096))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    packages: dict[str, Path] = dict(args.packages)
    if len(packages) < 2:
        parser.error("give at least two packages with different names")
    longest = max(*args.prefill, *args.contexts) + 1
    loaded = {
        name: common.load_backend(
            folder, slots=max(args.rows), context_tokens=longest, threads=args.threads
        )
        for name, folder in packages.items()
    }
    cases = [_prefill_case(loaded, length, args.rounds) for length in args.prefill]
    for context in args.contexts:
        cases += decode_cases(loaded, context, args.rows, args.rounds)
    for backend, _ in loaded.values():
        backend.close()
    figures = common.report(
        {"backends": {n: caps.name for n, (_, caps) in loaded.items()}, "cases": cases}
    )
    common.show(figures, _table(list(packages), cases), as_json=args.json)


def prefill_plans(caps: Capabilities, length: int) -> list[StepPlan]:
    """A prompt of random tokens in slot 0, in the longest chunks, with logits at its end."""
    rng = random.Random(length)
    tokens = tuple(rng.randrange(caps.vocab_size) for _ in range(length))
    starts = range(0, length, caps.max_row_tokens)
    chunks = [tokens[start : start + caps.max_row_tokens] for start in starts]
    return [
        StepPlan(0, (Row(0, 0, start, chunk, int(start + len(chunk) == length)),))
        for start, chunk in zip(starts, chunks, strict=True)
    ]


def _prefill_case(loaded: Loaded, length: int, rounds: int) -> dict[str, Any]:
    def measure(backend: Backend, caps: Capabilities) -> float:
        return length / common.run_plans(backend, prefill_plans(caps, length))

    measures = {name: partial(measure, *both) for name, both in loaded.items()}
    return _case(f"prefill {length}", common.take_turns(measures, rounds))


def decode_cases(
    loaded: Loaded, context: int, row_counts: tuple[int, ...], rounds: int
) -> Iterator[dict[str, Any]]:
    """Decode at one context length; the cache is filled once and given back at the end."""
    slots = max(row_counts)
    for backend, caps in loaded.values():
        common.run_plans(backend, list(fill_plans(caps, slots, context)))
    for rows in row_counts:
        plans = [decode_plan(rows, context)] * DECODE_STEPS

        def measure(backend: Backend, plans: list[StepPlan]) -> float:
            common.run_plans(backend, plans[:1])  # weights of another package are in the cache
            return plans[0].num_tokens * len(plans) / common.run_plans(backend, plans)

        measures = {name: partial(measure, both[0], plans) for name, both in loaded.items()}
        yield _case(f"decode {rows} x {context}", common.take_turns(measures, rounds))
    release = StepPlan(0, (), tuple(KvRelease(slot) for slot in range(slots)))
    for backend, _ in loaded.values():
        common.run_plans(backend, [release])


def _case(title: str, values: dict[str, list[float]]) -> dict[str, Any]:
    names = list(values)
    return {
        "case": title,
        "tok_s": {name: median(values[name]) for name in names},
        "ratios": {
            f"{a}/{b}": common.pair_ratio(values, a, b)
            for i, a in enumerate(names)
            for b in names[i + 1 :]
        },
        "rounds": values,
    }


def _table(names: list[str], cases: list[dict[str, Any]]) -> list[str]:
    ratios = [f"{names[0]}/{other}" for other in names[1:]]
    head = [*(f"{name} tok/s" for name in names), *ratios]
    lines = [f"{'':18}" + "".join(f"{title:>22}" for title in head)]
    for case in cases:
        cells = [f"{case['tok_s'][name]:.1f}" for name in names]
        cells += [f"{case['ratios'][ratio]:.2f}" for ratio in ratios]
        lines.append(f"{case['case']:18}" + "".join(f"{cell:>22}" for cell in cells))
    return lines


if __name__ == "__main__":
    main()
