"""What a run found, as a file; files of several runs together; a home that keeps all of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.measure import Sample


class ResultError(Exception):
    """Results that do not belong together, or a file that would be overwritten."""


@dataclass(frozen=True, slots=True)
class LoadSample:
    """Requests that came at random times.

    Attributes:
        tokens: new tokens that the requests asked for.
        latencies_s: from the arrival of each to its end.
    """

    peer: str
    round: int
    tokens: int
    wall_s: float
    latencies_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StartSample:
    """A process of its own: from its start to the first token, and its memory after a batch."""

    peer: str
    round: int
    first_token_s: float
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class Result:
    """Everything that one run measured, or several of the same settings on the same machine.

    Attributes:
        peers: what each says of itself, versions included.
        failures: why others have no figures.
        decode, prefill: `Sample`s; those of `prefill` have one new token.
        divergence: mean KL in nats of D(FP32 || peer) over the same text, where logits are shown.
    """

    date: str
    command: str
    machine: Mapping[str, Any]
    threads: int
    settings: Mapping[str, Any]
    peers: Mapping[str, Any]
    failures: Mapping[str, str]
    decode: tuple[Sample, ...] = ()
    prefill: tuple[Sample, ...] = ()
    loads: tuple[LoadSample, ...] = ()
    starts: tuple[StartSample, ...] = ()
    divergence: Mapping[str, float] = field(default_factory=dict)


def to_json(result: Result) -> str:
    return json.dumps(dataclasses.asdict(result)) + "\n"


def from_json(text: str) -> Result:
    """The opposite of `to_json`."""
    data = json.loads(text)
    for name in ("decode", "prefill"):
        data[name] = tuple(
            Sample(**{**sample, "token_ids": tuple(map(tuple, sample["token_ids"]))})
            for sample in data[name]
        )
    for name, kind in (("loads", LoadSample), ("starts", StartSample)):
        data[name] = tuple(kind(**sample) for sample in data[name])
    return Result(**data)


def merge(results: Sequence[Result]) -> Result:
    """One result of several; rounds are numbered anew, so that pairs stay pairs.

    A peer that failed in one run and not in another keeps its figures and its failure.

    Raises:
        ResultError: they are of different machines, threads, settings or versions.
    """
    first, peers = results[0], dict(results[0].peers)
    for other in results[1:]:
        ours, theirs = ({**r.settings, "batches": (), "threads": r.threads} for r in (first, other))
        if ours != theirs:
            raise ResultError(f"settings differ: {ours}, {theirs}")
        if first.machine["cpu"] != other.machine["cpu"]:
            raise ResultError(f"two machines: {first.machine['cpu']}, {other.machine['cpu']}")
        for peer, about in other.peers.items():
            if peer in peers and peers[peer]["versions"] != about["versions"]:
                raise ResultError(f"two versions of {peer}")
            peers.setdefault(peer, about)
    lists: dict[str, Any] = {}
    for name in ("decode", "prefill", "loads", "starts"):
        lists[name] = tuple(
            dataclasses.replace(sample, round=sample.round + _STRIDE * number)
            for number, result in enumerate(results)
            for sample in getattr(result, name)
        )
    batches = {batch for result in results for batch in result.settings["batches"]}
    return dataclasses.replace(
        first,
        settings={**first.settings, "batches": sorted(batches)},
        peers=peers,
        command="; ".join(dict.fromkeys(result.command for result in results)),
        failures={peer: why for result in results for peer, why in result.failures.items()},
        divergence={peer: kl for result in results for peer, kl in result.divergence.items()},
        **lists,
    )


_STRIDE = 1000  # more than a run has rounds


def publish(files: Mapping[str, str], folder: Path) -> list[Path]:
    """Write new files, all or none.

    Raises:
        ResultError: one of them exists.
    """
    paths = {folder / name: text for name, text in files.items()}
    require_new(list(paths))
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in paths.items():
        with path.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
    return list(paths)


def require_new(paths: Sequence[Path]) -> None:
    """
    Raises:
        ResultError: one of them exists.
    """
    for path in paths:
        if path.exists():
            raise ResultError(f"{path} exists; remove it, or choose another folder")
