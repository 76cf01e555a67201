"""Rounds over all peers, A B C A B C, so that noise of the machine meets all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from peers.environments import PeerError

TokenIds = list[int]
Say = Callable[[str], None]

RUN_TIMEOUT_S = 600.0
SETTLE_S = 0.3  # before each turn: threads that spin for a while after theirs fall asleep
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
        token_ids: the new tokens of each sequence.
    """

    peer: str
    batch: int
    round: int
    first_s: float
    wall_s: float
    idle_s: float
    idle_cpu_s: float
    token_ids: tuple[tuple[int, ...], ...]


def windows(token_ids: Sequence[int], length: int) -> Iterator[TokenIds]:
    """Prompts without end: pieces of the text, taken as a ring, that begin at different places.

    So no prompt begins like an earlier one, and no peer can reuse what it has in a cache.
    """
    start = 0
    while True:
        yield [token_ids[(start + i) % len(token_ids)] for i in range(length)]
        start += _STRIDE_TOKENS


def measure(
    runners: Mapping[str, Runner],
    plan: Plan,
    text_ids: Sequence[int],
    say: Say,
    *,
    settle_s: float = SETTLE_S,
) -> tuple[list[Sample], dict[str, str]]:
    """Measure all peers; the first round of each batch size warms up and is not kept.

    Returns:
        samples, and for each peer that failed on the way why; what it had done is kept.
    """
    samples: list[Sample] = []
    failures: dict[str, str] = {}
    prompts = windows(text_ids, plan.prompt_tokens)
    for batch in plan.batches:
        for round_ in range(plan.repeats + 1):
            first = [next(prompts) for _ in range(batch)]
            whole = [next(prompts) for _ in range(batch)]
            title = f"round {round_} of {plan.repeats}" if round_ else "warm-up"
            say(f"{batch} at once, {title}")
            for peer, runner in runners.items():
                if peer in failures:
                    continue
                time.sleep(settle_s)
                try:
                    answers = _turn(runner, first, whole, plan.new_tokens)
                except PeerError as error:
                    failures[peer] = f"at {batch} at once: {error}"
                    say(f"{peer} {failures[peer]}")
                    continue
                if round_:
                    samples.append(_sample(peer, batch, round_, *answers))
    return samples, failures


def _turn(
    runner: Runner, first: Sequence[TokenIds], whole: Sequence[TokenIds], new_tokens: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    runs = ((first, 1), (whole, new_tokens))
    one, all_ = (
        runner.request({"op": "run", "prompts": prompts, "new_tokens": n}, RUN_TIMEOUT_S)
        for prompts, n in runs
    )
    return one, all_


def _sample(
    peer: str, batch: int, round_: int, first: Mapping[str, Any], whole: Mapping[str, Any]
) -> Sample:
    return Sample(
        peer=peer,
        batch=batch,
        round=round_,
        first_s=first["wall_s"],
        wall_s=whole["wall_s"],
        idle_s=first["idle_s"],
        idle_cpu_s=first["idle_cpu_s"],
        token_ids=tuple(tuple(ids) for ids in whole["token_ids"]),
    )
