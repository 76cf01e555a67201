"""Which weights get more bits, given what each costs in fidelity and in time. Pure functions.

Predicted time of a product with n rows is the larger of reading its weight and of multiplying. A
format's cost is the sum over steps of 1 and of 16 rows: the one is bound by memory, so it stands
for bytes, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Bytes a weight, and products of 2 x rows x weights in GFLOP/s with many rows: ratios as measured
# on processors with AVX-512 VNNI (docs/measurements.md).
_BYTES = {
    "w8a8_row": 1.0,
    "w7a8_row": 1.0,
    "w8a8_block": 1.125,
    "keep": 1.125,
    "fp32": 4.0,
    "w4a8_block": 0.64,
    "w4a8_block64": 0.57,
}
_GFLOP_S = {
    "w8a8_row": 300.0,
    "w7a8_row": 300.0,
    "w8a8_block": 190.0,
    "keep": 190.0,
    "fp32": 100.0,
    "w4a8_block": 170.0,
    "w4a8_block64": 170.0,
}
_GBYTE_S = 10.0
_ROWS = (1, 16)
_BARGAIN = 8.0  # share of the cost for a share of the time
_MARGIN = 0.9  # of the threshold, aimed at: single costs do not quite add up


@dataclass(frozen=True, slots=True)
class Upgrade:
    """A weight that could be stored in a better format.

    `saved_nats` is what it costs now less what it would cost; `added_us` predicted time (`_ROWS`).
    """

    name: str
    format: str
    saved_nats: float
    added_us: float


def predicted_us(shape: tuple[int, int], format_name: str) -> float:
    """Predicted microseconds of a product with a weight [out, in], summed over `_ROWS`."""
    weights = shape[0] * shape[1]
    reading = _BYTES[format_name] * weights / (_GBYTE_S * 1e3)
    return sum(max(reading, 2 * n * weights / (_GFLOP_S[format_name] * 1e3)) for n in _ROWS)


def choose_upgrades(
    joint_nats: float,
    threshold_nats: float,
    assigned_nats: Mapping[str, float],
    candidates: Sequence[Upgrade],
) -> list[Upgrade]:
    """The cheapest upgrades after which the joint cost is predicted to be under the threshold.

    Single costs are scaled so that they add up to the joint cost. Taken are those that save most
    for their time, at most one a weight; all of them if that does not suffice.
    """
    total = sum(assigned_nats.values())
    scale = joint_nats / total if total > 0 else 0.0
    wanted = joint_nats - _MARGIN * threshold_nats
    useful = [c for c in candidates if c.saved_nats > 0]
    taken: dict[str, Upgrade] = {}
    for upgrade in sorted(useful, key=lambda c: -c.saved_nats / max(c.added_us, 1e-9)):
        if scale * sum(u.saved_nats for u in taken.values()) >= wanted:
            break
        taken.setdefault(upgrade.name, upgrade)
    return list(taken.values())


def choose_bargains(
    assigned_nats: Mapping[str, float], total_us: float, candidates: Sequence[Upgrade]
) -> list[Upgrade]:
    """Upgrades that pay under any threshold, at most one a weight: a few weights may cost many
    times as much as others of their size.

    Args:
        total_us: predicted time of all weights as they are (`_ROWS`).
    """
    total_nats = sum(assigned_nats.values())
    taken: dict[str, Upgrade] = {}
    for upgrade in sorted(candidates, key=lambda c: c.added_us):
        least_nats = _BARGAIN * total_nats * upgrade.added_us / total_us
        if upgrade.saved_nats > max(0.0, least_nats):
            taken.setdefault(upgrade.name, upgrade)
    return list(taken.values())


def keep_sensitive(
    costs_nats: Mapping[str, float], sizes: Mapping[str, int], budget: int
) -> list[str]:
    """Weights to keep in a larger format: those that cost most for their size, within a budget."""
    kept, spent = [], 0
    for name in sorted(sizes, key=lambda n: -costs_nats[n] / sizes[n]):
        if spent + sizes[name] <= budget:
            kept.append(name)
            spent += sizes[name]
    return kept
