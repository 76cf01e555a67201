"""Whether `headrace plan MODEL` takes the best way: its choice against all ways, measured longer.

    python tools/bench/plan.py [NAME=]PACKAGE... [--sequences 4] [--steps 32] [--rounds 3] [--json]

All ways take turns; each is given the median of its rounds.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import common

from headrace.runtime.commands.plan_package import find_candidates, measure, plan_package
from headrace.runtime.manifest import read_manifest
from headrace.runtime.planning.candidates import Candidate


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("packages", nargs="+", type=common.named_package)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    lines = []
    for name, folder in args.packages:
        best = plan_package(folder, args.sequences)["best"]
        chosen = Candidate(**best)
        ways = find_candidates(read_manifest(folder), args.sequences)
        rounds: dict[Candidate, list[float]] = {way: [] for way in ways}
        for _ in range(args.rounds):
            for way, values in rounds.items():
                values.append(measure(folder, way, args.sequences, args.steps))
        speeds = {way: median(values) for way, values in rounds.items()}
        share = speeds[chosen] / max(speeds.values())
        results[name] = {
            "chosen": best,
            "share_of_best": share,
            "ways": [
                {"device": way.device, **way.options(), "tok_s": speed}
                for way, speed in speeds.items()
            ],
        }
        lines.append(f"{name}: the chosen way has {share:.1%} of the best one's tokens/s")
        lines += [
            f"  {'*' if way == chosen else ' '} {way.device} threads {way.num_threads} stages "
            f"{way.stages} micro-batches {way.micro_batches} depth {way.pipeline_depth} "
            f"{speed:8.1f} tok/s"
            for way, speed in speeds.items()
        ]
    common.show(common.report({"packages": results}), lines, as_json=args.json)


if __name__ == "__main__":
    main()
