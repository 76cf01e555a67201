"""What the benchmarks share: packages by name, rounds that take turns, one table and JSON."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from headrace.backends.base import Backend, Capabilities
from headrace.backends.registry import choose_device, create_backend
from headrace.runtime.commands.bench import hardware, versions
from headrace.runtime.config import EngineConfig
from headrace.runtime.core import StepPlan
from headrace.runtime.machine.hardware import probe_hardware
from headrace.runtime.manifest import read_manifest

# Threads of other sessions spin for 40 ms after their last step and would slow the next one.
SETTLE_S = 0.06


def parser(description: str | None) -> argparse.ArgumentParser:
    """With the options that every benchmark has."""
    made = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    made.add_argument("--json", action="store_true", help="print a JSON object")
    made.add_argument("--threads", type=int, help="threads inside the model")
    return made


def named_package(text: str) -> tuple[str, Path]:
    """`NAME=DIR`, or a folder, whose name it takes."""
    name, equals, folder = text.partition("=")
    return (name, Path(folder)) if equals else (Path(text).name, Path(text))


def percentile(values: Sequence[float], percent: int) -> float:
    """NaN of nothing."""
    ordered = sorted(values)
    return ordered[round(percent / 100 * (len(ordered) - 1))] if ordered else math.nan


def numbers(text: str) -> tuple[int, ...]:
    """A list like 1,4,16."""
    return tuple(int(part) for part in text.split(","))


def load_backend(
    folder: Path, *, slots: int, context_tokens: int, threads: int | None
) -> tuple[Backend, Capabilities]:
    """A loaded backend with room for `slots` sequences of `context_tokens` tokens."""
    manifest = read_manifest(folder)
    config = EngineConfig(
        max_sequences=slots,
        num_threads=threads,
        context_tokens=min(context_tokens, manifest.model.context_tokens),
    )
    device = choose_device("auto", manifest)
    backend = create_backend(device, folder, manifest, config, probe_hardware())
    return backend, backend.load()


def run_plans(backend: Backend, plans: Sequence[StepPlan]) -> float:
    """Wall time of these steps in seconds."""
    start = time.perf_counter()
    for plan in plans:
        backend.collect(backend.submit(plan))
    return time.perf_counter() - start


def take_turns(measures: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Every measure once a round, A B A B, after one round that does not count.

    Whatever slows the machine for a while then slows all of them.
    """
    values: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(rounds + 1):
        for name, measure in measures.items():
            time.sleep(SETTLE_S)
            value = measure()
            if number:
                values[name].append(value)
    return values


def pair_ratio(values: Mapping[str, Sequence[float]], first: str, second: str) -> float:
    """Median over the rounds of first / second."""
    pairs = zip(values[first], values[second], strict=True)
    return median(a / b for a, b in pairs)


def report(figures: dict[str, Any]) -> dict[str, Any]:
    """Figures with the machine and the versions that they hold for."""
    return {**figures, "versions": versions(), "hardware": hardware()}


def show(figures: dict[str, Any], lines: Sequence[str], *, as_json: bool) -> None:
    """One table, or everything as JSON."""
    if as_json:
        print(json.dumps(figures, indent=1))
        return
    machine, found = figures["hardware"], figures["versions"]
    print(f"{machine['cpu_name']}, {machine['usable_cores']} cores", end=", ")
    print(f"onnxruntime {found.get('onnxruntime')}, headrace {found.get('headrace')}")
    print("\n".join(lines))
