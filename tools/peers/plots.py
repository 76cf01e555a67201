"""A picture of a result: bars of tokens a second, drawn as SVG without any library."""

from __future__ import annotations

from html import escape

from peers.overview import Metric, metrics
from peers.results import Result
from peers.specs import PEERS, REFERENCE, REFERENCE_DRAFTS

_WIDTH, _LEFT, _BAR, _GAP, _TITLE = 760, 290, 18, 4, 34
_OURS, _OTHERS = "#4c78a8", "#b0b0b0"


def bars(result: Result) -> str:
    """A group of bars for each metric that is tokens a second, longer is better."""
    y, parts = 8, []
    for metric in metrics(result):
        if metric.title.endswith("tok/s"):
            height, group = _group(metric, y)
            y += height
            parts.append(group)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 8}" '
        f'font-family="sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _group(metric: Metric, top: int) -> tuple[int, str]:
    """Height and drawing of one metric's bars, in the order of the peers."""
    speeds = {p: v for p in PEERS if (v := metric.median_of(p)) is not None}
    scale = (_WIDTH - _LEFT - 80) / max(speeds.values())
    lines = [f'<text x="8" y="{top + 18}" font-weight="bold">{escape(metric.title)}</text>']
    for row, (peer, speed) in enumerate(speeds.items()):
        y = top + _TITLE + row * (_BAR + _GAP)
        color = _OURS if peer in (REFERENCE, REFERENCE_DRAFTS) else _OTHERS
        middle, width = y + _BAR - 5, speed * scale
        lines += [
            f'<text x="{_LEFT - 8}" y="{middle}" text-anchor="end">'
            f"{escape(PEERS[peer].title)}</text>",
            f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{color}"/>',
            f'<text x="{_LEFT + width + 6:.1f}" y="{middle}">{speed:.0f}</text>',
        ]
    return _TITLE + len(speeds) * (_BAR + _GAP) + 8, "\n".join(lines)
