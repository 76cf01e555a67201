"""Several ways to decode the same requests, a step of one and then a step of another.

Whatever slows the machine for a second then slows all of them alike, which whole runs that take
turns cannot promise. Each side has a clock that only its own steps move. All share one session,
since waiting threads of others would disturb it; each has slots of its own.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from headrace.backends.base import Backend, Capabilities
from headrace.runtime.config import EngineConfig, GenerationConfig
from headrace.runtime.core import KvCopy, KvOp, KvRelease, StepPlan
from headrace.runtime.drafting.drafter import Drafter
from headrace.runtime.engine import Engine

WINDOW_TOKENS = 8
MAX_ANSWER_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Job:
    prompt_ids: tuple[int, ...]
    num_tokens: int


def make_jobs(prompts: Sequence[Sequence[int]], count: int, seed: int) -> list[Job]:
    """Answers as long as those of chats: log-normal, median 64, sigma 1, from 16 to 512 tokens."""
    rng = random.Random(seed)
    lengths = [
        min(max(round(rng.lognormvariate(math.log(64), 1)), 16), MAX_ANSWER_TOKENS)
        for _ in range(count)
    ]
    return [Job(tuple(prompts[i % len(prompts)]), n) for i, n in enumerate(lengths)]


@dataclass(slots=True)
class Outcome:
    """Of one side; times by its own clock."""

    seconds: float = 0.0
    num_steps: int = 0
    written: dict[int, list[int]] = field(default_factory=dict)  # by number of the job
    stamps_s: dict[int, list[float]] = field(default_factory=dict)  # when each token was there
    latencies_s: list[float] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.written.values()))

    @property
    def tok_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def request_ms(self) -> list[float]:
        """A token, over each answer."""
        return [1000 * (s[-1] - s[0]) / (len(s) - 1) for s in self.stamps_s.values()]

    @property
    def window_ms(self) -> list[float]:
        """A token, over all windows of eight tokens."""
        return [
            1000 * (last - first) / WINDOW_TOKENS
            for stamps in self.stamps_s.values()
            for first, last in zip(stamps, stamps[WINDOW_TOKENS:], strict=False)
        ]


class NoText:
    """Text costs all sides the same."""

    stopped = None

    def push(self, token_ids: object) -> str:
        return ""

    def finish(self) -> str:
        return ""

    def take_calls(self) -> tuple[()]:
        return ()


class SlotRange:
    """Some slots of a loaded backend, as a backend of their own that counts its steps."""

    def __init__(self, backend: Backend, caps: Capabilities, first: int, count: int) -> None:
        self._backend, self._first = backend, first
        self._caps = replace(
            caps, max_slots=count, kv_budget_tokens=caps.kv_budget_tokens * count // caps.max_slots
        )
        self.collect, self.num_steps = backend.collect, 0

    def load(self) -> Capabilities:
        slots = range(self._caps.max_slots)
        self.collect(self.submit(StepPlan(0, (), tuple(KvRelease(slot) for slot in slots))))
        return self._caps

    def submit(self, plan: StepPlan) -> int:
        self.num_steps += bool(plan.rows)
        rows = tuple(row._replace(slot=row.slot + self._first) for row in plan.rows)
        ops = tuple(self._moved(op) for op in plan.kv_ops)
        return self._backend.submit(replace(plan, rows=rows, kv_ops=ops))

    def _moved(self, op: KvOp) -> KvOp:
        if isinstance(op, KvCopy):
            return replace(op, source=op.source + self._first, target=op.target + self._first)
        return replace(op, slot=op.slot + self._first)

    def close(self) -> None:
        """The backend goes on."""


@dataclass(frozen=True, slots=True)
class Way:
    """How to decode.

    Attributes:
        drafter: guesses tokens; none without one.
        in_batches: who waits comes in when all of the batch before have ended.
        keeps_rows: all of a batch decode as long as its longest, and are done with it.
    """

    drafter: Drafter | None = None
    in_batches: bool = False
    keeps_rows: bool = False


def run(
    loaded: tuple[Backend, Capabilities], ways: Mapping[str, Way], jobs: Sequence[Job], count: int
) -> dict[str, Outcome]:
    """All jobs in every way, `count` of them in flight. Whose share of work done is least is next.

    Needs `count` slots for each of the ways.
    """
    sides = {
        name: _Side(SlotRange(*loaded, first=i * count, count=count), way, jobs, count)
        for i, (name, way) in enumerate(ways.items())
    }
    under_way = list(sides.values())
    while under_way:
        side = min(under_way, key=lambda side: side.progress)
        side.step()
        if side.has_ended:
            under_way.remove(side)
    return {name: side.outcome for name, side in sides.items()}


class _Side:
    """One way to decode some jobs, a step at a time."""

    def __init__(self, backend: SlotRange, way: Way, jobs: Sequence[Job], count: int) -> None:
        config = EngineConfig(max_sequences=count, max_draft_tokens=0, prefix_cache_bytes=0)
        self._engine = Engine(backend, lambda _: NoText(), (), config, drafter=way.drafter)
        self._backend, self._jobs, self._keeps_rows = backend, jobs, way.keeps_rows
        numbers, size = list(range(len(jobs))), count if way.in_batches else len(jobs)
        self._batches = [numbers[first : first + size] for first in numbers[::size]]
        self._asked_tokens = {n: self._ask(n, batch) for batch in self._batches for n in batch}
        self._num_asked = sum(self._asked_tokens.values())
        self._begun: dict[int, int] = {}  # the batch under way: numbers of jobs by request
        self._num_done = 0
        self.outcome = Outcome()

    def _ask(self, number: int, batch: Sequence[int]) -> int:
        kept = batch if self._keeps_rows else [number]
        return max(self._jobs[n].num_tokens for n in kept)

    @property
    def progress(self) -> float:
        """Share of the tokens that are there, from 0 to 1."""
        return self._num_done / self._num_asked

    @property
    def has_ended(self) -> bool:
        return not (self._begun or self._batches)

    def step(self) -> None:
        if not self._begun:
            self._begin(self._batches.pop(0))
        outcome = self.outcome
        start = time.perf_counter()
        events = self._engine.step()
        outcome.seconds += time.perf_counter() - start
        for event in events:
            assert event.delta is not None, event.error
            number, token_ids = self._begun[event.request.request_id], event.delta.token_ids
            outcome.written[number] += token_ids
            outcome.stamps_s[number] += [outcome.seconds] * len(token_ids)
            self._num_done += len(token_ids)
        if not self._engine.has_work:
            self._end()

    def _begin(self, batch: Sequence[int]) -> None:
        for number in batch:
            generation = GenerationConfig(max_new_tokens=self._asked_tokens[number])
            request = self._engine.prepare(self._jobs[number].prompt_ids, generation)
            self._begun[request.request_id] = number
            self.outcome.written[number], self.outcome.stamps_s[number] = [], []
            self._engine.add(request)

    def _end(self) -> None:
        """The batch is over: forget what rows that were kept wrote beyond their answers."""
        outcome = self.outcome
        outcome.num_steps = self._backend.num_steps
        last_s = max(outcome.stamps_s[number][-1] for number in self._begun.values())
        for number in self._begun.values():
            written, stamps = outcome.written[number], outcome.stamps_s[number]
            outcome.latencies_s.append(last_s if self._keeps_rows else stamps[-1])
            num_tokens = self._jobs[number].num_tokens
            del written[num_tokens:], stamps[num_tokens:]
        self._begun = {}
