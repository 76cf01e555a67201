"""How long answers take to go on when a rank is killed in the middle of decoding, and what is left.

    python tools/bench/killed_ranks.py PACKAGE [--kills 10] [--json]

PACKAGE was exported with --tensor-parallel. Each time four answers are under way when one of the
ranks gets SIGKILL. The clock runs from there to the next token, and to the last answer's end; the
answers have to be those of an undisturbed run, and no process may be left that was there before.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import common
import psutil

from headrace.runtime import GenerationConfig, Runtime
from headrace.runtime.worker import RequestHandle

ANSWERS = GenerationConfig(max_new_tokens=48, ignore_eos=True)
PROMPTS = ([5, 6, 7], [8, 9], [10], [11, 12, 13, 14])
LIMIT_S = 60.0


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("--kills", type=int, default=10)
    args = parser.parse_args()
    next_s, end_s, orphans = [], [], 0
    with Runtime.load(args.package, "cpu", num_threads=args.threads) as runtime:
        expected = [runtime.generate(prompt, ANSWERS).token_ids for prompt in PROMPTS]
        for number in range(args.kills):
            ranks = psutil.Process().children()
            handles = [runtime.submit(prompt, ANSWERS) for prompt in PROMPTS]
            stream = iter(handles[0])
            for _ in range(5 + number):
                next(stream)
            ranks[number % len(ranks)].kill()
            start = time.perf_counter()
            steps = runtime.steps[-1].step_id
            wait_for_step(runtime, steps + 2)  # the first may have been over when it died
            next_s.append(time.perf_counter() - start)
            found = results(handles)
            end_s.append(time.perf_counter() - start)
            assert found == expected, "an answer changed"
            orphans += sum(is_alive(rank) for rank in ranks)
        last = psutil.Process().children()
    orphans += sum(is_alive(rank) for rank in last)
    figures = {
        "kills": args.kills,
        "next_step_s": {"median": median(next_s), "max": max(next_s)},
        "all_ended_s": {"median": median(end_s), "max": max(end_s)},
        "orphans": orphans,
    }
    lines = [
        f"{args.kills} kills of a rank with {len(PROMPTS)} answers under way, all answers the same",
        f"until the next step     {median(next_s):.2f} s, at most {max(next_s):.2f} s",
        f"until all have ended    {median(end_s):.2f} s, at most {max(end_s):.2f} s",
        f"processes left behind   {orphans}",
    ]
    common.show(common.report(figures), lines, as_json=args.json)


def wait_for_step(runtime: Runtime, step_id: int) -> None:
    """Until such a step has ended; steps that had begun before the kill may be among them."""
    deadline = time.monotonic() + LIMIT_S
    while runtime.steps[-1].step_id < step_id:
        assert time.monotonic() < deadline, f"no step within {LIMIT_S} s"
        time.sleep(0.005)


def results(handles: list[RequestHandle]) -> list[tuple[int, ...]]:
    return [handle.result(LIMIT_S).choices[0].token_ids for handle in handles]


def is_alive(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


if __name__ == "__main__":
    main()
