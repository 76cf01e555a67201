"""A chat turn by turn: tokens fed and time to first token, with texts kept and without.

    python tools/bench/chat.py DIR [--turns 10] [--rounds 3]

Every message is about as long, so a turn costs what its own tokens cost where the chat so far is
found in the prefix cache, and more each turn where it is not.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import common

from headrace.runtime import Runtime

TOPICS = (
    "rivers",
    "bridges",
    "bread",
    "stars",
    "maps",
    "winter",
    "clocks",
    "birds",
    "glass",
    "tea",
)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("package", type=Path, metavar="DIR")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--new-tokens", type=int, default=48, help="of every answer")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    sides: dict[str, list[list[tuple[float, int]]]] = {"kept": [], "computed": []}
    for _ in range(args.rounds):
        for name, kept_bytes in (("kept", None), ("computed", 0)):
            with Runtime.load(
                args.package, num_threads=args.threads, prefix_cache_bytes=kept_bytes
            ) as runtime:
                runtime.generate("Warm up.", max_new_tokens=4)
                sides[name].append(chat(runtime, args.turns, args.new_tokens))
    turns = []
    lines = [f"{'turn':>5}{'kept ms':>10}{'tokens':>8}{'computed ms':>13}{'tokens':>8}"]
    for i in range(args.turns):
        kept, computed = ([side[i] for side in sides[name]] for name in ("kept", "computed"))
        turn = {
            "kept_ms": median(ms for ms, _ in kept),
            "kept_tokens": kept[0][1],
            "computed_ms": median(ms for ms, _ in computed),
            "computed_tokens": computed[0][1],
        }
        turns.append(turn)
        lines.append(
            f"{i + 1:5}{turn['kept_ms']:10.1f}{turn['kept_tokens']:8}"
            f"{turn['computed_ms']:13.1f}{turn['computed_tokens']:8}"
        )
    common.show(common.report({"turns": turns}), lines, as_json=args.json)


def chat(runtime: Runtime, turns: int, new_tokens: int) -> list[tuple[float, int]]:
    """(time to first token in ms, prompt tokens that were fed) of each turn."""
    messages: list[dict[str, str]] = []
    found = []
    for i in range(turns):
        topic = TOPICS[i % len(TOPICS)]
        messages.append(
            {"role": "user", "content": f"Tell me something new about {topic}, please."}
        )
        last = runtime.steps[-1].step_id
        start = time.perf_counter()
        first_ms, text = 0.0, ""
        for delta in runtime.chat(
            messages, stream=True, max_new_tokens=new_tokens, ignore_eos=True
        ):
            first_ms = first_ms or 1000 * (time.perf_counter() - start)
            text += delta.text
        steps = [step for step in runtime.steps if step.step_id > last]
        fed = sum(step.num_tokens - step.drafted for step in steps) - (new_tokens - 1)
        fed += sum(step.accepted for step in steps)
        messages.append({"role": "assistant", "content": text})
        found.append((first_ms, fed))
    return found


if __name__ == "__main__":
    main()
