"""Choose a format for each weight by measurement, for the precisions that do (`auto`, `int4`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from headrace.exporters.calibrate import CalibrationChunks, calibration_format
from headrace.exporters.graph.decoder import DecoderParts
from headrace.exporters.graph.linear import LinearFormat
from headrace.exporters.graph.mixed import MixedFormat
from headrace.exporters.precision import FORMATS, Precision, Rule, first_match
from headrace.exporters.selection import (
    Upgrade,
    choose_bargains,
    choose_upgrades,
    keep_sensitive,
    predicted_us,
)
from headrace.exporters.sensitivity import measure_sensitivity

_PIECE_TOKENS = 48  # of prose and of conversation each, to measure single weights on
_KEPT_SHARE = 0.18  # of an INT4 package's weights, embedding and head aside, that stay INT8

Sensitivity = dict[str, dict[str, float]]  # weight: format: mean KL in nats


@dataclasses.dataclass(slots=True)
class FormatPlan:
    """Which weight gets which format, and what was measured about that.

    Attributes:
        rules: pins; the first that matches wins over everything else.
        raised: formats chosen by measurement.
        sensitivity: what a weight alone costs in a format, where that was measured.
    """

    precision: Precision
    heads: frozenset[str]
    rules: tuple[Rule, ...] = ()
    raised: dict[str, str] = dataclasses.field(default_factory=dict)
    sensitivity: Sensitivity = dataclasses.field(default_factory=dict)

    def format_of(self, weight_name: str) -> str:
        rule = first_match(self.rules, weight_name)
        if rule is not None:
            return rule.format
        usual = self.precision.format
        if self.precision.head is not None and weight_name in self.heads:
            usual = self.precision.head
        return self.raised.get(weight_name, usual)

    def make(self) -> MixedFormat:
        """A fresh format for one package."""
        return MixedFormat(format_maker(self.format_of))

    def nats_of(self, weight_name: str) -> float | None:
        """What the weight's format costs alone; None where it was not measured."""
        name = self.format_of(weight_name)
        if name == "fp32" and self.sensitivity:
            return 0.0
        return self.sensitivity.get(weight_name, {}).get(name)


def format_maker(name_of: Callable[[str], str]) -> Callable[[str], LinearFormat]:
    """A chooser for `MixedFormat`, with one instance of each format."""
    made: dict[str, LinearFormat] = {}

    def choose(weight_name: str) -> LinearFormat:
        name = name_of(weight_name)
        if name not in made:
            made[name] = FORMATS[name]()
        return made[name]

    return choose


class Measurement:
    """Sensitivities of one model, measured when first needed.

    Args:
        parts: with Gram matrices where weights are to be rounded with them.
        folder: takes graphs.
        report: called with a stage, how many weights are done and of how many.
    """

    def __init__(
        self,
        plan: FormatPlan,
        parts: DecoderParts,
        chunks: CalibrationChunks,
        folder: Path,
        report: Callable[[str, int, int], None],
    ) -> None:
        self._plan, self._parts, self._folder, self._report = plan, parts, folder, report
        pieces = chunks.seen[:2]
        self._text = [i for chunk in pieces for i in chunk[:_PIECE_TOKENS]]
        self._shapes: dict[str, tuple[int, int]] = {}

    def measure(self) -> None:
        """What each weight costs in the format that the plan gives it; done once."""
        if not self._plan.sensitivity:
            self._measure(self._plan.format_of)

    def keep_sensitive(self) -> None:
        """Keep the weights that cost most for their size in the better format."""
        self.measure()
        plan, better = self._plan, self._plan.precision.measured[0]
        low = {
            n: c[plan.precision.format]
            for n, c in plan.sensitivity.items()
            if plan.format_of(n) == plan.precision.format
        }
        sizes = {name: self._size(name) for name in low}
        for name in keep_sensitive(low, sizes, int(_KEPT_SHARE * sum(sizes.values()))):
            plan.raised[name] = better

    def take_bargains(self) -> None:
        """Give more bits where that saves far more than it costs, whatever the threshold."""
        self.measure()
        assigned, plan = self._assigned(), self._plan
        total_us = sum(self._time(name, plan.format_of(name)) for name in assigned)
        chosen = choose_bargains(assigned, total_us, self._candidates(assigned))
        plan.raised |= {upgrade.name: upgrade.format for upgrade in chosen}

    def upgrade(self, joint_nats: float, threshold_nats: float) -> bool:
        """Give more bits to what costs most for its time; False if nothing is left to give."""
        self.measure()
        assigned = self._assigned()
        candidates = self._candidates(assigned)
        chosen = choose_upgrades(joint_nats, threshold_nats, assigned, candidates)
        self._plan.raised |= {upgrade.name: upgrade.format for upgrade in chosen}
        return bool(chosen)

    def _assigned(self) -> dict[str, float]:
        """What weights cost in the formats that they have."""
        return {name: self._plan.nats_of(name) or 0.0 for name in self._plan.sensitivity}

    def _candidates(self, assigned: dict[str, float]) -> list[Upgrade]:
        """All that could be better, but what rules pin."""
        plan, ladder = self._plan, self._plan.precision.measured
        candidates = []
        for name, nats in assigned.items():
            now = plan.format_of(name)
            if first_match(plan.rules, name) is not None:
                continue
            for better in ladder[ladder.index(now) + 1 if now in ladder else 0 :]:
                saved = nats - self._cost_in(name, better)
                added = self._time(name, better) - self._time(name, now)
                candidates.append(Upgrade(name, better, saved, added))
        return candidates

    def _cost_in(self, name: str, format_name: str) -> float:
        if format_name == "fp32":
            return 0.0
        if format_name not in self._plan.sensitivity[name]:
            self._measure(lambda _: format_name)
        return self._plan.sensitivity[name][format_name]

    def _time(self, name: str, format_name: str) -> float:
        return predicted_us(self._shapes[name], format_name)

    def _size(self, name: str) -> int:
        rows, columns = self._shapes[name]
        return rows * columns

    def _measure(self, name_of: Callable[[str], str]) -> None:
        plan = self._plan
        costs = measure_sensitivity(
            self._parts,
            calibration_format(self._parts.spec),
            format_maker(name_of),
            self._text,
            self._folder,
            lambda done, total: self._report("measuring weights", done, total),
        )
        for name, cost in costs.items():
            self._shapes[name] = cost.shape
            plan.sensitivity.setdefault(name, {})[name_of(name)] = cost.nats
