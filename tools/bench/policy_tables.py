"""What `policies.py` prints: ratios of the shipped policy to the other sides, with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import geometric_mean, mean, stdev
from typing import Any

from policy_drafters import ENTROPY_EDGES_NATS

# (key of an outcome, title, whether its interval is shown)
MEASURES = (
    ("tok_s", "tok/s", True),
    ("mean_latency_s", "mean latency", False),
    ("median_latency_s", "median latency", False),
    ("p99_window_ms", "P99 window", False),
    ("p99_request_ms", "P99 request", False),
    ("steps_per_token", "weight passes", False),
)


def table(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Speed of the policy against each other side, by number of sequences; by category too, where
    it was measured against no drafts."""
    names = [name for name in cells[0]["sides"] if name != "policy"]
    counts = sorted({cell["sequences"] for cell in cells})
    lines = [f"{'policy against':24}" + "".join(f"{name:>18}" for name in names)]
    for count in counts:
        chosen = [cell["sides"] for cell in cells if cell["sequences"] == count]
        for key, title, has_interval in MEASURES:
            texts = []
            for name in names:
                ratios = [sides["policy"][key] / sides[name][key] for sides in chosen]
                texts.append(interval(ratios) if has_interval else middle(ratios))
            lines.append(f"{count:3} x {title:18}" + "".join(f"{text:>18}" for text in texts))
    if "plain" in names:
        lines.append(f"{'policy / plain, tok/s':24}" + "".join(f"{n:>18}" for n in counts))
        for category in sorted({cell["category"] for cell in cells}):
            texts = []
            for count in counts:
                found = [c["sides"] for c in cells if _is_of(c, category, count)]
                texts.append(
                    interval([s["policy"]["tok_s"] / s["plain"]["tok_s"] for s in found])
                    if found
                    else "-"
                )
            lines.append(f"{category:24}" + "".join(f"{text:>18}" for text in texts))
    return lines


def _is_of(cell: Mapping[str, Any], category: str, count: int) -> bool:
    return bool(cell["category"] == category and cell["sequences"] == count)


def middle(ratios: Sequence[float]) -> str:
    return f"{geometric_mean(ratios):.3f}"


def interval(ratios: Sequence[float]) -> str:
    """Geometric mean and its 95% interval, by the normal approximation on logarithms."""
    logs = [math.log(ratio) for ratio in ratios]
    half = 1.96 * stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    low, high = (math.exp(mean(logs) + sign * half) for sign in (-1, 1))
    return f"{math.exp(mean(logs)):.2f} ({low:.2f}-{high:.2f})"


def entropy_table(found: Mapping[int, Sequence[Mapping[str, int]]]) -> list[str]:
    edges = ["0", *map(str, ENTROPY_EDGES_NATS), "inf"]
    lines = ["accepted / drafted by entropy of the token before (nats)"]
    for count, bins in found.items():
        texts = [
            f"{edges[i]}-{edges[i + 1]}: {b['accepted']}/{b['drafted']}" for i, b in enumerate(bins)
        ]
        lines.append(f"{count:3}  " + "  ".join(texts))
    return lines
