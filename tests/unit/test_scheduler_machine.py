"""Any order of arrivals, cancels, interruptions, steps and failures keeps the books and
everybody's text.

The device is the fake backend, whose answer depends on every token in a slot, and which refuses
what a real one would read as garbage; so a wrong past, copy or slot shows in the tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from engine_samples import make_limits
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.backends.base import StepOutput
from headrace.backends.fake import FakeBackend, hashed_logits
from headrace.runtime.core import (
    FinishReason,
    RowResult,
    SampledToken,
    Sequence,
    SequenceState,
    StepPlan,
    StepResult,
)
from headrace.runtime.scheduling.fairness import Fairness
from headrace.runtime.scheduling.prefix_index import common_length
from headrace.runtime.scheduling.scheduler import Scheduler

VOCAB, CONTEXT, SLOTS, BUDGET = 32, 40, 3, 90
LOGITS = hashed_logits(VOCAB)


def greedy_alone(prompt: list[int], new_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(min(new_tokens, CONTEXT - len(prompt))):
        tokens.append(int(LOGITS(tokens).argmax()))
    return tokens


def greedy_results(plan: StepPlan, output: StepOutput) -> StepResult:
    lines = iter(output.logits.argmax(axis=1).tolist() if len(output.logits) else [])
    rows = [
        RowResult(row.seq_id, (SampledToken(next(lines), 0.0),) if row.num_logits else ())
        for row in plan.rows
    ]
    return StepResult(plan.step_id, tuple(rows), output.model_ms)


class SchedulerMachine(RuleBasedStateMachine):
    prefix_cache_tokens, quantum_steps, top_priority = 0, 10_000, 0

    def __init__(self) -> None:
        super().__init__()
        limits = make_limits(
            max_slots=SLOTS,
            context_tokens=CONTEXT,
            kv_budget_tokens=BUDGET,
            prefix_cache_tokens=self.prefix_cache_tokens,
            max_chunk_tokens=16,
        )
        self.scheduler = Scheduler(limits, Fairness(self.quantum_steps))
        self.backend = FakeBackend(
            vocab_size=VOCAB,
            context_tokens=CONTEXT,
            max_slots=SLOTS,
            max_row_tokens=16,
            kv_budget_tokens=BUDGET,
            logits=LOGITS,
        )
        self.sequences: list[Sequence] = []
        self.shared: set[int] = set()  # those that came while another had their whole prompt

    def alive(self) -> list[Sequence]:
        return [s for s in self.sequences if s.state is not SequenceState.FINISHED]

    @rule(
        prompt_len=st.integers(1, 39),
        new=st.integers(1, 30),
        n=st.integers(1, 4),
        pick=st.integers(0, 1000),
        shared=st.integers(0, 39),
    )
    def add(self, prompt_len: int, new: int, n: int, pick: int, shared: int) -> None:
        """The same prompt `n` times; it may begin like another text."""
        first_id = len(self.sequences)
        prompt = [(first_id * 7 + i) % VOCAB for i in range(prompt_len)]
        if self.sequences:
            other = self.sequences[pick % first_id].tokens[:shared]
            prompt = (other + prompt)[:prompt_len]
        priority = pick % (self.top_priority + 1)
        for i in range(n):
            one = Sequence(first_id + i, list(prompt), prompt_len, new, priority=priority)
            if any(map(begins_with(one), self.alive())):
                self.shared.add(one.seq_id)
            self.scheduler.add(one)
            self.sequences.append(one)

    @precondition(lambda self: self.sequences)
    @rule(pick=st.integers(0, 1000))
    def cancel(self, pick: int) -> None:
        one = self.sequences[pick % len(self.sequences)]
        was_alive = one.state is not SequenceState.FINISHED
        assert self.scheduler.cancel(one.seq_id) == was_alive

    @rule(pick=st.none() | st.integers(0, 1000))
    def step(self, pick: int | None) -> None:
        self.run_step(pick)

    def run_step(self, pick: int | None = None) -> bool:
        """One step; perhaps with a cancel while it is in flight. False if nothing is to be done."""
        oldest = next((s for s in self.sequences if s.state is SequenceState.WAITING), None)
        had_room = self.scheduler.num_running == 0
        plan = self.scheduler.schedule()
        if plan is None:
            assert not self.scheduler.has_work
            return False
        if (
            oldest is not None and had_room and not self.top_priority
        ):  # nobody is overtaken for ever
            assert oldest.state is SequenceState.RUNNING
        output = self.backend.collect(self.backend.submit(plan))
        if pick is not None and self.sequences:
            self.cancel(pick)
        for one in self.scheduler.commit(plan, greedy_results(plan, output)):
            assert one.state is SequenceState.FINISHED
        return True

    @rule()
    def several_steps(self) -> None:
        for _ in range(8):
            self.run_step()

    @rule()
    def fail(self) -> None:
        """A step that the device refuses before doing anything."""
        if (plan := self.scheduler.schedule()) is not None:
            running = self.scheduler.num_running
            assert len(self.scheduler.fail(plan)) == running
            assert self.scheduler.num_running == 0

    @invariant()
    def books_are_in_order(self) -> None:
        self.scheduler.check_integrity()
        assert len(self.alive()) == self.scheduler.num_running + self.scheduler.num_waiting

    @invariant()
    def admission_is_in_order_of_arrival(self) -> None:
        """No later one runs before, except one that waits for its prompt to be computed."""
        if self.top_priority:
            return  # those interrupted arrived earlier
        patient = [s for s in self.alive() if s.seq_id not in self.shared]
        started = [s.state is SequenceState.RUNNING for s in patient]
        assert started == sorted(started, reverse=True)

    def teardown(self) -> None:
        steps = 0
        while self.run_step():
            steps += 1
            assert steps < 10_000, "starved"
        assert self.scheduler.num_free_slots == SLOTS
        assert self.backend.held_tokens <= self.prefix_cache_tokens
        for one in self.sequences:
            assert one.state is SequenceState.FINISHED
            expected = greedy_alone(one.tokens[: one.prompt_len], one.max_new_tokens)
            if one.finish_reason is FinishReason.LENGTH:
                assert one.tokens == expected
            else:
                assert one.tokens == expected[: len(one.tokens)]


class FairMachine(SchedulerMachine):
    """With a prefix cache, priorities and turns so short that sequences interrupt each other."""

    prefix_cache_tokens, quantum_steps, top_priority = 60, 5, 2


def begins_with(one: Sequence) -> Callable[[Sequence], bool]:
    text = one.tokens[:-1]
    return lambda other: common_length(text, other.tokens) == len(text)


TestSchedulerMachine = SchedulerMachine.TestCase
TestFairMachine = FairMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=30)
TestFairMachine.settings = settings(max_examples=60, stateful_step_count=30)


def test_the_oracle_is_sensitive() -> None:
    """The same last token after another prefix gives other logits."""
    assert not np.array_equal(LOGITS([1, 2, 3]), LOGITS([2, 2, 3]))
