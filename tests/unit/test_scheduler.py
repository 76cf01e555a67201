from __future__ import annotations

import subprocess
import sys

import pytest
from engine_samples import make_limits, result_of

from headrace.runtime.core import (
    FinishReason,
    KvCopy,
    KvRelease,
    Sequence,
    SequenceState,
    StepPlan,
)
from headrace.runtime.errors import InsufficientMemoryError, PromptTooLongError
from headrace.runtime.scheduling.fairness import MIN_CHUNK_TOKENS, ChunkBudget
from headrace.runtime.scheduling.scheduler import Scheduler


def sequence(seq_id: int, prompt_len: int = 4, new: int = 8, parent: int | None = None) -> Sequence:
    """`parent`: the sequence whose prompt this one repeats."""
    letter = seq_id if parent is None else parent
    return Sequence(seq_id, [letter % 50] * prompt_len, prompt_len, new)


def step(scheduler: Scheduler, model_ms: float = 1.0) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, result_of(plan, model_ms=model_ms))
    scheduler.check_integrity()
    return plan


def shape(plan: StepPlan) -> list[tuple[int, int, int, int]]:
    """Slot, past, new tokens and logits of each row."""
    return [(r.slot, r.past_len, len(r.tokens), r.num_logits) for r in plan.rows]


def test_prompt_then_tokens_then_length() -> None:
    scheduler, one = Scheduler(make_limits()), sequence(1, 4, 3)
    scheduler.add(one)
    assert shape(step(scheduler)) == [(0, 0, 4, 1)]
    assert shape(step(scheduler)) == [(0, 4, 1, 1)]
    plan = scheduler.schedule()
    assert plan is not None and shape(plan) == [(0, 5, 1, 1)]
    assert scheduler.commit(plan, result_of(plan)) == [one]
    assert one.finish_reason is FinishReason.LENGTH and one.slot is None
    assert one.tokens == [1, 1, 1, 1, 7, 7, 7]
    # The slot is given back although nobody else has anything to do.
    last = step(scheduler)
    assert last.rows == () and last.kv_ops == (KvRelease(0),)
    assert not scheduler.has_work and scheduler.schedule() is None


def test_long_prompt_is_cut_and_everybody_else_goes_on() -> None:
    scheduler = Scheduler(make_limits(context_tokens=200, max_chunk_tokens=64))
    scheduler.add(sequence(1, 2, 50))
    step(scheduler)
    step(scheduler, model_ms=10.0)
    scheduler.add(sequence(2, 100, 50))
    # Nothing is known of the cost of prompts but two tokens in 1 ms: 64 of them fit.
    assert shape(step(scheduler, model_ms=10.0 + 640.0)) == [(0, 3, 1, 1), (1, 0, 64, 0)]
    # 64 took 640 ms, so about 10 fit 100 ms: the smallest chunk it is.
    assert shape(step(scheduler)) == [(0, 4, 1, 1), (1, 64, MIN_CHUNK_TOKENS, 0)]
    scheduler.cancel(1)
    assert shape(step(scheduler)) == [(1, 80, 20, 1)]


def test_older_prompt_gets_the_budget_first() -> None:
    scheduler = Scheduler(make_limits(max_chunk_tokens=10))
    scheduler.add(sequence(1, 8))
    scheduler.add(sequence(2, 8))
    scheduler.add(sequence(3, 8))
    assert shape(step(scheduler)) == [(0, 0, 8, 1), (1, 0, 2, 0)]


def test_rows_ascend_by_slot_whatever_the_order_of_admission() -> None:
    scheduler = Scheduler(make_limits())
    for i in (1, 2, 3):
        scheduler.add(sequence(i))
    step(scheduler)
    scheduler.cancel(1)
    scheduler.add(sequence(4))
    plan = step(scheduler)
    assert [(r.seq_id, r.slot) for r in plan.rows] == [(4, 0), (2, 1), (3, 2)]
    assert plan.kv_ops == (KvRelease(0),)


def test_who_does_not_fit_waits_and_those_behind_too() -> None:
    scheduler = Scheduler(make_limits(kv_budget_tokens=40))
    scheduler.add(sequence(1, 10, 10))
    scheduler.add(sequence(2, 20, 10))
    scheduler.add(sequence(3, 1, 2))
    step(scheduler)
    assert scheduler.num_running == 1 and scheduler.num_waiting == 2
    scheduler.cancel(1)
    step(scheduler)
    assert scheduler.num_running == 2 and scheduler.num_waiting == 0


def test_siblings_copy_the_prompt() -> None:
    scheduler = Scheduler(make_limits(max_chunk_tokens=16))
    parent, *others = sequence(1, 20), sequence(2, 20, 8, 1), sequence(3, 20, 8, 1)
    for one in (parent, *others, sequence(4, 3)):
        scheduler.add(one)
    # The siblings wait for the prompt; the stranger behind them does not.
    assert [r.seq_id for r in step(scheduler).rows] == [1]
    assert scheduler.num_running == 2
    assert [r.seq_id for r in step(scheduler).rows] == [1, 4]
    plan = step(scheduler)
    assert plan.kv_ops == (KvCopy(0, 2, 19), KvCopy(0, 3, 19))
    assert shape(plan) == [(0, 20, 1, 1), (1, 3, 1, 1), (2, 19, 1, 1), (3, 19, 1, 1)]


def test_siblings_of_a_prompt_of_one_token_need_no_copy() -> None:
    scheduler = Scheduler(make_limits())
    scheduler.add(sequence(1, 1))
    scheduler.add(sequence(2, 1, 8, 1))
    plan = step(scheduler)
    assert plan.kv_ops == () and shape(plan) == [(0, 0, 1, 1), (1, 0, 1, 1)]


def test_sibling_computes_the_prompt_when_nobody_has_it_any_more() -> None:
    scheduler = Scheduler(make_limits(max_slots=1))
    for one in (sequence(1, 6), sequence(2, 6, 8, 1), sequence(3, 6, 8, 1)):
        scheduler.add(one)
    step(scheduler)
    scheduler.cancel(1)
    assert shape(step(scheduler)) == [(0, 0, 6, 1)]
    assert scheduler.num_waiting == 1


def test_copy_comes_after_the_release_of_its_target() -> None:
    scheduler = Scheduler(make_limits(max_slots=2))
    for one in (sequence(1, 20), sequence(9, 6), sequence(2, 20, 8, 1)):
        scheduler.add(one)
    step(scheduler)
    scheduler.cancel(9)
    assert step(scheduler).kv_ops == (KvRelease(1), KvCopy(0, 1, 19))


def test_cancel_in_flight_drops_the_result() -> None:
    scheduler, one, two = Scheduler(make_limits()), sequence(1), sequence(2)
    scheduler.add(one)
    scheduler.add(two)
    plan = scheduler.schedule()
    assert plan is not None
    assert scheduler.cancel(1) and not scheduler.cancel(1) and not scheduler.cancel(77)
    assert scheduler.commit(plan, result_of(plan)) == []
    assert one.tokens == [1] * 4 and one.finish_reason is FinishReason.CANCELLED
    assert two.tokens == [2] * 4 + [7]
    assert [r.seq_id for r in step(scheduler).rows] == [2]


def test_failed_step_ends_what_ran_and_nothing_else() -> None:
    scheduler = Scheduler(make_limits(max_slots=1))
    one, two = sequence(1, new=1), sequence(2)
    scheduler.add(one)
    scheduler.add(two)
    step(scheduler)
    plan = scheduler.schedule()
    assert plan is not None and plan.kv_ops == (KvRelease(0),)
    assert scheduler.fail(plan) == [two] and two.finish_reason is FinishReason.ERROR
    scheduler.check_integrity()
    three = sequence(3)
    scheduler.add(three)
    # The failed step may not have released anything: it is said again, once.
    assert step(scheduler).kv_ops == (KvRelease(0),)
    assert three.state is SequenceState.RUNNING


def test_answer_is_cut_at_the_context() -> None:
    scheduler, one = Scheduler(make_limits(context_tokens=10)), sequence(1, 7, 100)
    scheduler.add(one)
    for _ in range(3):
        step(scheduler)
    assert len(one.tokens) == 10 and one.finish_reason is FinishReason.LENGTH


def test_what_can_never_be_served_is_refused_at_once() -> None:
    scheduler = Scheduler(make_limits(kv_budget_tokens=32))
    with pytest.raises(PromptTooLongError, match="64 tokens, but the context holds 64"):
        scheduler.add(sequence(1, 64))
    with pytest.raises(InsufficientMemoryError, match="lower max_new_tokens"):
        scheduler.add(sequence(2, 20, 13))
    scheduler.add(sequence(3, 20, 12))
    assert scheduler.num_waiting == 1


def test_no_wish_fills_context_or_memory() -> None:
    assert make_limits().new_tokens(10, None) == 54
    assert make_limits(kv_budget_tokens=32).new_tokens(10, None) == 22
    with pytest.raises(InsufficientMemoryError):
        make_limits(kv_budget_tokens=32).new_tokens(32, None)


def test_chunk_budget_follows_the_machine() -> None:
    budget = ChunkBudget(100.0, 512)
    assert budget.tokens(0) == 512 and budget.tokens(3) == MIN_CHUNK_TOKENS
    budget.observe(3, 0, 20.0)
    budget.observe(3, 16, 52.0)  # 32 ms more for 16 tokens
    assert budget.token_ms == pytest.approx(2.0)
    assert budget.tokens(3) == 48  # 50 fit; budgets are multiples of 16
    for _ in range(30):
        budget.observe(3, 48, 20.0 + 4.8)
    assert budget.tokens(3) == 512
    for _ in range(30):
        budget.observe(0, 512, 51200.0)
    assert budget.tokens(3) == MIN_CHUNK_TOKENS and budget.tokens(0) == 512


def test_chunk_budget_survives_odd_timings() -> None:
    budget = ChunkBudget(100.0, 8)  # less than the smallest chunk
    for decode_rows, prompt_tokens, model_ms in [(0, 5, 0.0), (2, 0, 50.0), (2, 5, 1.0)]:
        budget.observe(decode_rows, prompt_tokens, model_ms)
        assert budget.tokens(2) == 8
    budget.observe(2, 1, 1e9)
    assert budget.tokens(2) == 8


def test_scheduler_loads_nothing_heavy() -> None:
    code = (
        "import sys, headrace.runtime.scheduling.scheduler; "
        "bad = {'numpy', 'onnxruntime', 'tokenizers', 'asyncio'} & set(sys.modules); "
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
