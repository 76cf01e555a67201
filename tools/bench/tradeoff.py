"""Fidelity against speed: packages of one checkpoint as points of a picture, and a table.

    python tools/bench/tradeoff.py fp32=DIR "row INT8=DIR" ... --text FILE -o docs/tradeoff.svg

The first package is FP32; the others' distance to it is what `headrace bench --fidelity` gives.
Speed is decoding on the backend alone, measured in turns (`compare.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

import common
from compare import decode_cases

from headrace.runtime.commands.bench_fidelity import measure_fidelity
from headrace.runtime.manifest import read_manifest

_PANEL, _HEIGHT, _LEFT, _TOP, _BOTTOM = 400, 300, 60, 30, 44
_COLOR = "#4c78a8"


@dataclass(frozen=True, slots=True)
class Point:
    """A package. `tok_s`: by the number of rows; `kl_nats`: mean to the FP32 package."""

    name: str
    tok_s: dict[int, float]
    kl_nats: float
    weight_bytes: int


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("packages", nargs="+", type=common.named_package, metavar="NAME=DIR")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--skip", type=float, default=0.0, help="share that was calibrated on")
    parser.add_argument("--text-tokens", type=int, default=4096)
    parser.add_argument("--rows", type=common.numbers, default=(1, 16), metavar="LIST")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    packages: dict[str, Path] = dict(args.packages)
    room = {"slots": max(args.rows), "context_tokens": args.context + 1, "threads": args.threads}
    loaded = {name: common.load_backend(folder, **room) for name, folder in packages.items()}
    speeds = dict(
        zip(args.rows, decode_cases(loaded, args.context, args.rows, args.rounds), strict=True)
    )
    for backend, _ in loaded.values():
        backend.close()
    reference, *others = packages.values()
    distances = [0.0]
    for folder in others:
        about = {"skip_share": args.skip, "text_tokens": args.text_tokens}
        found = measure_fidelity(folder, reference, args.text, **about)
        distances.append(found["text"]["mean_kl_nats"])
    points = [
        Point(
            name,
            {rows: case["tok_s"][name] for rows, case in speeds.items()},
            distance,
            read_manifest(packages[name]).targets[0].weight_bytes,
        )
        for name, distance in zip(packages, distances, strict=True)
    ]
    args.output.write_text(draw(points), encoding="utf-8")
    figures = {"points": [asdict(point) for point in points], "context": args.context}
    common.show(common.report(figures), _table(points), as_json=args.json)


def draw(points: Sequence[Point]) -> str:
    """A panel for each number of rows: faster to the right, nearer to FP32 below.

    Distances are drawn by their logarithm; FP32 itself is at the lower edge.
    """
    logs = [math.log10(point.kl_nats) for point in points if point.kl_nats > 0]
    low, high = math.floor(min(logs)), math.ceil(max(logs))

    def height_of(kl_nats: float) -> float:
        share = (math.log10(kl_nats) - low + 0.5) / (high - low + 0.5) if kl_nats > 0 else 0.0
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    row_counts = list(points[0].tok_s)
    width = _PANEL * len(row_counts)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{_HEIGHT}" fill="#fff"/>',
    ]
    ticks = [(0.0, "0"), *((10.0**power, f"{10.0**power:g}") for power in range(low, high + 1))]
    for number, rows in enumerate(row_counts):
        left, right = number * _PANEL + _LEFT, (number + 1) * _PANEL - 20
        title = "1 sequence" if rows == 1 else f"{rows} sequences"
        parts.append(f'<text x="{left}" y="16" font-weight="bold">{title}</text>')
        for kl_nats, text in ticks:
            y = height_of(kl_nats)
            parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="#ddd"/>')
            parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        fastest = max(point.tok_s[rows] for point in points)
        heights = [height_of(point.kl_nats) for point in points]
        for point in points:
            share, y = point.tok_s[rows] / fastest, height_of(point.kl_nats)
            below = 15 if any(0 < y - other < 30 for other in heights) else -5
            x, side, anchor = left + share * (right - left), 9, "start"
            if share > 0.5:  # there is more room at its left
                side, anchor = -9, "end"
            label = f"{point.name}: {point.tok_s[rows]:.0f}, {point.weight_bytes / 1e6:.0f} MB"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{_COLOR}"/>')
            parts.append(
                f'<text x="{x + side:.1f}" y="{y + below:.1f}" text-anchor="{anchor}">'
                f"{escape(label)}</text>"
            )
        parts.append(
            f'<text x="{left}" y="{_HEIGHT - 8}">tokens a second, faster to the right</text>'
        )
    parts.append(f'<text x="6" y="{_TOP - 2}" fill="#666">nats</text>')
    return "\n".join([*parts, "</svg>\n"])


def _table(points: Sequence[Point]) -> list[str]:
    row_counts = list(points[0].tok_s)
    titles = [*(f"{rows} rows tok/s" for rows in row_counts), "KL nats", "MB"]
    lines = [f"{'':18}" + "".join(f"{title:>16}" for title in titles)]
    for point in points:
        cells = [f"{point.tok_s[rows]:.1f}" for rows in row_counts]
        cells += [f"{point.kl_nats:.4f}", f"{point.weight_bytes / 1e6:.0f}"]
        lines.append(f"{point.name:18}" + "".join(f"{cell:>16}" for cell in cells))
    return lines


if __name__ == "__main__":
    main()
