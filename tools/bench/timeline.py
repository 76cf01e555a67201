"""Draw who shared the steps of a real run: time to the right, a lane for each sequence.

    python tools/bench/timeline.py PACKAGE -o docs/timeline.svg

Prompts of several lengths arrive together. A box is a row of a step: a piece of a prompt, or the
tokens that an answer got, drafts that were right included.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from headrace.runtime import Runtime
from headrace.runtime.core import LaneRecord, RowRecord

_PROMPTS = (
    "Name three rivers.",
    "Repeat this list twice: red, green, blue, white, black, yellow, pink, brown.",
    "Write a short poem about the sea.",
    "Copy this text: The quick brown fox jumps over the lazy dog. " * 6,
    "What is the capital of France?",
    "Summarize: " + "The river rises in the mountains and flows to the sea. " * 16,
)
_WIDTH, _LANE, _LEFT, _TOP = 900, 26, 60, 30
_COLORS = {"prompt": "#8c8c8c", "token": "#4c78a8", "drafts": "#f58518"}
_WORDS = {"prompt": "prompt", "token": "one token", "drafts": "more tokens, guessed ahead"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="timeline.py", description=__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--new-tokens", type=int, default=48)
    args = parser.parse_args()
    with Runtime.load(args.package, max_sequences=len(_PROMPTS)) as runtime:
        runtime.generate("warm up", max_new_tokens=2)
        before = runtime.lanes[-1].step_id
        talks = runtime.generate(list(_PROMPTS), max_new_tokens=args.new_tokens, temperature=0)
        steps = [step for step in runtime.lanes if step.step_id > before]
    num_tokens = sum(talk.completion_tokens for talk in talks)
    args.output.write_text(draw(steps), encoding="utf-8")
    print(f"{args.output}: {len(steps)} steps, {num_tokens} tokens of {len(talks)} answers")


def kind_of(row: RowRecord) -> str:
    """What a row was, as a key of the legend."""
    if row.is_prompt:
        return "prompt"
    return "drafts" if row.accepted else "token"


def draw(steps: Sequence[LaneRecord]) -> str:
    """An SVG picture of these steps, oldest first."""
    begin_s = steps[0].end_s - steps[0].step_ms / 1e3
    scale = _WIDTH / (steps[-1].end_s - begin_s)
    slots = sorted({row.slot for step in steps for row in step.rows})
    height = _TOP + _LANE * len(slots) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 10} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_LEFT + _WIDTH + 10}" height="{height}" fill="#fff"/>',
    ]
    for i, (kind, word) in enumerate(_WORDS.items()):
        key = _LEFT + 130 * i
        parts.append(f'<rect x="{key}" y="6" width="12" height="12" fill="{_COLORS[kind]}"/>')
        parts.append(f'<text x="{key + 17}" y="16">{word}</text>')
    for lane, slot in enumerate(slots):
        parts.append(f'<text x="6" y="{_TOP + _LANE * lane + 16}">lane {slot + 1}</text>')
    for step in steps:
        x = _LEFT + (step.end_s - step.step_ms / 1e3 - begin_s) * scale
        width = max(step.step_ms / 1e3 * scale - 0.6, 0.4)
        for row in step.rows:
            y = _TOP + _LANE * slots.index(row.slot) + 3
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_LANE - 6}" '
                f'fill="{_COLORS[kind_of(row)]}"/>'
            )
    total_ms = (steps[-1].end_s - begin_s) * 1e3
    bottom = height - 8
    parts.append(f'<text x="{_LEFT}" y="{bottom}">0</text>')
    end = _LEFT + _WIDTH
    parts.append(f'<text x="{end}" y="{bottom}" text-anchor="end">{total_ms:.0f} ms</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
