"""Losses of a training as CSV and as a drawing."""

from __future__ import annotations

from collections.abc import Sequence

_WIDTH, _HEIGHT, _MARGIN = 640, 360, 48
_TRAIN, _HELD_OUT = "#9aa7b5", "#c0392b"


def loss_csv(train: Sequence[float], held_out: Sequence[tuple[int, float]], name: str) -> str:
    """One line for each number of steps done; a loss that was not measured there is empty."""
    measured = dict(held_out)
    lines = [f"steps,train_{name}_nats,held_out_{name}_nats"]
    for steps in range(max([len(train), *measured]) + 1):
        before = f"{train[steps - 1]:.6f}" if 0 < steps <= len(train) else ""
        judged = f"{measured[steps]:.6f}" if steps in measured else ""
        lines.append(f"{steps},{before},{judged}")
    return "\n".join(lines) + "\n"


def loss_svg(train: Sequence[float], held_out: Sequence[tuple[int, float]], title: str) -> str:
    """Both losses over steps, from zero, as an SVG drawing."""
    points = list(enumerate(train, 1))
    last = max([1, *(step for step, _ in [*points, *held_out])])
    top = max([1e-9, *(loss for _, loss in [*points, *held_out])])

    def line(values: Sequence[tuple[int, float]], colour: str) -> str:
        places = " ".join(
            f"{_MARGIN + step / last * (_WIDTH - 2 * _MARGIN):.1f},"
            f"{_HEIGHT - _MARGIN - loss / top * (_HEIGHT - 2 * _MARGIN):.1f}"
            for step, loss in values
        )
        return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.5"/>'

    def text(x: int, y: int, words: str, colour: str = "#333") -> str:
        return f'<text x="{x}" y="{y}" fill="{colour}">{words}</text>'

    bottom, right = _HEIGHT - _MARGIN, _WIDTH - _MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
            f'<path d="M{_MARGIN} {_MARGIN}V{bottom}H{right}" fill="none" stroke="#333"/>',
            line(points, _TRAIN),
            line(held_out, _HELD_OUT),
            text(_MARGIN, _MARGIN - 24, title),
            text(_MARGIN, _MARGIN - 8, f"{top:.4f} at the top"),
            text(right - 150, _MARGIN - 24, "training batches", _TRAIN),
            text(right - 150, _MARGIN - 8, "held-out text", _HELD_OUT),
            text(right - 60, bottom + 20, f"{last} steps"),
            "</svg>\n",
        ]
    )
