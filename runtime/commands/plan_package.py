"""Which way of running a package is the fastest on this machine: every one is tried for a moment.

All are measured once, then the better half again in turns, so that what slows the machine for a
while slows all of them. Only decoding counts, as a user has it, through `Runtime`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from headrace.runtime.api import Runtime
from headrace.runtime.commands.bench import decode
from headrace.runtime.errors import BackendUnavailableError
from headrace.runtime.machine.hardware import probe_hardware
from headrace.runtime.manifest import Manifest, read_manifest
from headrace.runtime.planning.candidates import Candidate, candidates, choose

_PROMPT_TOKENS = 32
_STEPS = 16
_ROUNDS = 3  # of the better half


def plan_package(
    folder: Path, sequences: int, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Try all candidates; plain data.

    Args:
        sequences: decoded together.
        progress: called with what is being tried, and with "" at the end.

    Raises:
        HeadraceError: the package cannot be used, or has no room for so many sequences.
    """
    ways = find_candidates(read_manifest(folder), sequences)
    speeds: dict[Candidate, float] = {}
    for number, way in enumerate(ways):
        progress(f"trying {number + 1} of {len(ways)}")
        try:
            speeds[way] = measure(folder, way, sequences, _STEPS)
        except BackendUnavailableError:
            continue
    if not speeds:
        raise BackendUnavailableError("the package has no graphs for a device of this machine")
    better = sorted(speeds, key=lambda way: -speeds[way])[: max(2, len(speeds) // 2)]
    rounds: dict[Candidate, list[float]] = {way: [] for way in speeds if way in better}
    for number in range(_ROUNDS):
        progress(f"trying the better ones again, {number + 1} of {_ROUNDS}")
        for way, values in rounds.items():
            values.append(measure(folder, way, sequences, _STEPS))
    progress("")
    finals = {way: median(values) for way, values in rounds.items()}
    best = choose(finals)
    return {
        "sequences": sequences,
        "candidates": [
            {"device": way.device, **way.options(), "tok_s": finals.get(way, speed)}
            for way, speed in speeds.items()
        ],
        "best": {"device": best.device, **best.options()},
    }


def find_candidates(manifest: Manifest, sequences: int) -> list[Candidate]:
    """Of the devices that a package has graphs for; those for the CPU are run with all of its
    stages or as a whole."""
    devices = list(dict.fromkeys(target.device for target in manifest.targets))
    whole = [target for target in manifest.targets if target.device == "cpu" and not target.ranks]
    num_stages = max(1, len(whole[0].graphs[0].stages)) if whole else 1
    return candidates(devices, num_stages, probe_hardware().usable_cores, sequences)


def measure(folder: Path, way: Candidate, sequences: int, steps: int) -> float:
    """Tokens a second of all sequences together, decoding for at least `steps` steps."""
    options = {"max_sequences": sequences, "max_draft_tokens": 0, **way.options()}
    with Runtime.load(folder, way.device, **options) as runtime:
        prompt_tokens = min(_PROMPT_TOKENS, runtime.capabilities.context_tokens // 4)
        return decode(runtime, random.Random(0), sequences, prompt_tokens, steps)["decode_tok_s"]


def render(plan: dict[str, Any]) -> str:
    """`plan_package`'s result for people; the best has a star."""
    lines = [
        f"measured here, {plan['sequences']} sequences decoded together:",
        "",
        f"  {'device':8}{'threads':>8}{'stages':>8}{'micro-batches':>15}{'depth':>7}{'tok/s':>9}",
    ]
    for way in plan["candidates"]:
        star = "*" if all(way[name] == value for name, value in plan["best"].items()) else " "
        lines.append(
            f"{star} {way['device']:8}{way['num_threads']:8}{way['stages']:8}"
            f"{way['micro_batches']:15}{way['pipeline_depth']:7}{way['tok_s']:9.1f}"
        )
    options = {name: value for name, value in plan["best"].items() if name != "device"}
    text = ", ".join(f"{name}={value}" for name, value in options.items())
    lines += ["", f'best: Runtime.load(package, "{plan["best"]["device"]}", {text})']
    return "\n".join(lines)
