"""Rounds over all peers, A B C A B C, so that noise of the machine meets all of them alike.

A round in which somebody else used the CPU is measured again: peers whose threads wait for each
other at every step lose many times more by that than others do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from peers.environments import PeerError
from peers.machine import busy_cpu_s

TokenIds = list[int]
Say = Callable[[str], None]

RUN_TIMEOUT_S = 600.0
SETTLE_S = 0.3  # before each turn: threads that spin for a while after theirs fall asleep
MAX_OTHERS_CORES = 0.15  # CPU time of others in a turn, in cores, that leaves a round as it is
MAX_ATTEMPTS = 4  # times the rounds asked for
_STRIDE_TOKENS = 101  # prime: prompts start at different places of the text


class Runner(Protocol):
    """A worker that has loaded its model; `peers.client.Client` is one."""

    def request(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. Sizes in tokens for each sequence."""

    batches: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    repeats: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn of one peer.

    Attributes:
        first_s: wall time of a run with one new token for each sequence.
        wall_s: wall time of the run with all new tokens, on other prompts.
        idle_s, idle_cpu_s: time since the peer's turn before, CPU time that it used meanwhile.
        others_cores: CPU time of other processes in the turn, in cores; None where untold.
        token_ids: the new tokens of each sequence.
        prompt_tokens: of each sequence, where a run has several lengths.
    """

    peer: str
    batch: int
    round: int
    first_s: float
    wall_s: float
    idle_s: float
    idle_cpu_s: float
    others_cores: float | None
    token_ids: tuple[tuple[int, ...], ...]
    prompt_tokens: int = 0


def windows(token_ids: Sequence[int], length: int) -> Iterator[TokenIds]:
    """Prompts without end: pieces of the text, taken as a ring, that begin at different places.

    So no prompt begins like an earlier one, and no peer can reuse what it has in a cache.
    """
    start = 0
    while True:
        yield [token_ids[(start + i) % len(token_ids)] for i in range(length)]
        start += _STRIDE_TOKENS


def is_disturbed(samples: Sequence[Sample]) -> bool:
    """Whether somebody else used the CPU in a round with these samples."""
    return any((sample.others_cores or 0) > MAX_OTHERS_CORES for sample in samples)


def measure(
    runners: Mapping[str, Runner],
    plan: Plan,
    text_ids: Sequence[int],
    say: Say,
    *,
    settle_s: float = SETTLE_S,
) -> tuple[list[Sample], dict[str, str]]:
    """Measure all peers; the first round of each batch size warms up and is not kept.

    Disturbed rounds are kept only where there are too few others in `MAX_ATTEMPTS` times the
    rounds asked for.

    An interrupt from the keyboard ends the measurement, not the program.

    Returns:
        samples, and for each peer that failed on the way why; what it had done is kept.
    """
    samples: list[Sample] = []
    failures: dict[str, str] = {}
    prompts = windows(text_ids, plan.prompt_tokens)
    try:
        for batch in plan.batches:
            rounds = _rounds(runners, plan, batch, prompts, failures, say, settle_s)
            _keep_best(rounds, plan.repeats, samples)
    except KeyboardInterrupt:
        say("interrupted; the table shows what was measured")
    return samples, failures


def _keep_best(rounds: Iterator[list[Sample]], wanted: int, samples: list[Sample]) -> None:
    """Add samples of as many rounds as wanted, quiet ones first, also on an interrupt."""
    quiet: list[list[Sample]] = []
    disturbed: list[list[Sample]] = []
    try:
        while len(quiet) < wanted and (measured := next(rounds, None)) is not None:
            (disturbed if is_disturbed(measured) else quiet).append(measured)
    finally:
        for measured in [*quiet, *disturbed[: wanted - len(quiet)]]:
            samples += measured


def _rounds(
    runners: Mapping[str, Runner],
    plan: Plan,
    batch: int,
    prompts: Iterator[TokenIds],
    failures: dict[str, str],
    say: Say,
    settle_s: float,
) -> Iterator[list[Sample]]:
    """Rounds of one batch size, after one to warm up, as long as a peer is left."""
    for number in range(MAX_ATTEMPTS * plan.repeats + 1):
        say(f"{batch} at once, {f'round {number}' if number else 'warm-up'}")
        first = [next(prompts) for _ in range(batch)]
        whole = [next(prompts) for _ in range(batch)]
        round_ = _Round(batch, number, first, whole, plan.new_tokens)
        measured = _measure_round(runners, round_, failures, say, settle_s)
        if not measured:
            return
        if number:
            yield measured


@dataclass(frozen=True, slots=True)
class _Round:
    """Prompts of one round, the same for all peers."""

    batch: int
    number: int
    first: Sequence[TokenIds]
    whole: Sequence[TokenIds]
    new_tokens: int


def _measure_round(
    runners: Mapping[str, Runner],
    round_: _Round,
    failures: dict[str, str],
    say: Say,
    settle_s: float,
) -> list[Sample]:
    """A turn for each peer that has not failed; adds to `failures` those that do."""
    samples = []
    for peer, runner in runners.items():
        if peer in failures:
            continue
        time.sleep(settle_s)
        try:
            samples.append(_turn(peer, runner, round_))
        except PeerError as error:
            failures[peer] = f"at {round_.batch} at once: {error}"
            say(f"{peer} {failures[peer]}")
    return samples


def _turn(peer: str, runner: Runner, round_: _Round) -> Sample:
    start, busy_then = time.perf_counter(), busy_cpu_s()
    first, whole = (
        runner.request({"op": "run", "prompts": prompts, "new_tokens": n}, RUN_TIMEOUT_S)
        for prompts, n in ((round_.first, 1), (round_.whole, round_.new_tokens))
    )
    busy_now, duration_s = busy_cpu_s(), time.perf_counter() - start
    own_cpu_s = first["cpu_s"] + whole["cpu_s"]
    return Sample(
        peer=peer,
        batch=round_.batch,
        round=round_.number,
        first_s=first["wall_s"],
        wall_s=whole["wall_s"],
        idle_s=first["idle_s"],
        idle_cpu_s=first["idle_cpu_s"],
        others_cores=_others_cores(busy_then, busy_now, own_cpu_s, duration_s),
        token_ids=tuple(tuple(ids) for ids in whole["token_ids"]),
    )


def _others_cores(
    busy_then: float | None, busy_now: float | None, own_cpu_s: float, duration_s: float
) -> float | None:
    if busy_then is None or busy_now is None:
        return None
    return max(0.0, busy_now - busy_then - own_cpu_s) / duration_s
