"""Ways to run a package on this machine, and which of them to take, by what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Of two ways this near to each other the simpler one is taken.
TIE_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Candidate:
    """A device and fields of `EngineConfig`."""

    device: str
    num_threads: int
    stages: int = 1
    micro_batches: int = 1
    pipeline_depth: int = 1

    def options(self) -> dict[str, Any]:
        """Fields of `EngineConfig`."""
        return {
            "num_threads": self.num_threads,
            "stages": self.stages,
            "micro_batches": self.micro_batches,
            "pipeline_depth": self.pipeline_depth,
        }


def candidates(
    devices: Sequence[str], num_stages: int, usable_cores: int, sequences: int
) -> list[Candidate]:
    """All ways to try, simple ones first.

    Args:
        devices: that the package has graphs for.
        num_stages: that the package's graph for the CPU was exported in; 1 where it is whole only.
        usable_cores: threads that there may be.
        sequences: decoded together; no step is split in more parts.
    """
    found = []
    for device in devices:
        cores = [usable_cores] if device != "cpu" else [usable_cores, math.ceil(usable_cores / 2)]
        for threads in dict.fromkeys(cores):
            for stages, parts in _stagings(num_stages if device == "cpu" else 1, sequences):
                if parts == 1 or threads >= stages:
                    found += [Candidate(device, threads, stages, parts, d) for d in (1, 2)]
    return found


def _stagings(num_stages: int, sequences: int) -> list[tuple[int, int]]:
    """Stages and micro-batches."""
    if num_stages == 1:
        return [(1, 1)]
    parts = [n for n in (1, num_stages, 2 * num_stages) if n <= max(1, sequences)]
    return [(1, 1), *((num_stages, n) for n in parts)]


def choose(tok_s: Mapping[Candidate, float]) -> Candidate:
    """The fastest, or the first that is as fast but for noise."""
    best = max(tok_s.values())
    return next(c for c, speed in tok_s.items() if speed >= best * (1 - TIE_SHARE))
