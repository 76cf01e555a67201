"""Prompts that begin like texts that are there, and sequences that take turns."""

from __future__ import annotations

from engine_samples import make_limits, result_of

from headrace.runtime.core import KvCopy, KvRelease, Sequence, SequenceState, StepPlan
from headrace.runtime.scheduling.fairness import Fairness
from headrace.runtime.scheduling.scheduler import Scheduler

SYSTEM = list(range(100, 130))


def make_scheduler(fairness: Fairness | None = None, **limits: int) -> Scheduler:
    values = {"context_tokens": 200, "max_chunk_tokens": 200, "kv_budget_tokens": 600}
    made = make_limits(**{**values, "prefix_cache_tokens": 600, **limits})
    return Scheduler(made, fairness)


def add(scheduler: Scheduler, seq_id: int, tokens: list[int], new: int = 4, priority: int = 0):  # type: ignore[no-untyped-def]
    one = Sequence(seq_id, list(tokens), len(tokens), new, priority=priority)
    scheduler.add(one)
    return one


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, result_of(plan))
    scheduler.check_integrity()
    return plan


def finish(scheduler: Scheduler, one: Sequence) -> None:
    while one.state is not SequenceState.FINISHED:
        step(scheduler)


def test_a_chat_goes_on_where_it_was() -> None:
    scheduler = make_scheduler()
    turn = add(scheduler, 1, SYSTEM)
    finish(scheduler, turn)
    assert not scheduler.has_work  # what is kept is no work
    add(scheduler, 2, [*turn.tokens, 50, 51, 52])
    plan = step(scheduler)
    # The last token of the answer was never fed, so its KV is not there.
    assert plan.kv_ops == ()
    assert [(r.slot, r.past_len, r.tokens) for r in plan.rows] == [(0, 33, (7, 50, 51, 52))]


def test_an_edited_chat_leaves_the_original() -> None:
    scheduler = make_scheduler()
    turn = add(scheduler, 1, [*SYSTEM, *range(40)])
    finish(scheduler, turn)
    edited = add(scheduler, 2, [*SYSTEM, 50])
    plan = step(scheduler)
    assert plan.kv_ops == (KvCopy(0, 1, 30),)
    assert [(r.slot, r.past_len) for r in plan.rows] == [(1, 30)]
    finish(scheduler, edited)
    # Of two that begin alike, the one goes of which less is lost.
    add(scheduler, 3, [*SYSTEM, 60])
    plan = step(scheduler)
    assert plan.kv_ops == () and [(r.slot, r.past_len) for r in plan.rows] == [(1, 30)]


def test_one_computes_what_many_begin_with() -> None:
    scheduler = make_scheduler(max_chunk_tokens=64)
    system = list(range(100, 170))
    for seq_id in (1, 2, 3):
        add(scheduler, seq_id, [*system, seq_id, seq_id])
    add(scheduler, 4, [5, 6])
    assert [(r.seq_id, len(r.tokens)) for r in step(scheduler).rows] == [(1, 64)]
    plan = step(scheduler)
    assert plan.kv_ops == (KvCopy(0, 2, 64), KvCopy(0, 3, 64))  # the rest is not worth a wait
    assert {r.seq_id: r.past_len for r in plan.rows} == {1: 64, 4: 0, 2: 64, 3: 64}


def test_the_longest_unused_makes_room() -> None:
    scheduler = make_scheduler(max_slots=2)
    for seq_id, first in ((1, 10), (2, 20)):
        finish(scheduler, add(scheduler, seq_id, [first, *SYSTEM]))
    finish(scheduler, add(scheduler, 3, [10, *SYSTEM, 9, 9]))  # takes over the first
    add(scheduler, 4, [30, *SYSTEM])
    assert step(scheduler).kv_ops == (KvRelease(1),)


def test_no_more_is_kept_than_may_be() -> None:
    scheduler = make_scheduler(prefix_cache_tokens=50)
    finish(scheduler, add(scheduler, 1, [1, *SYSTEM]))
    finish(scheduler, add(scheduler, 2, [2, *SYSTEM]))
    assert scheduler.schedule().kv_ops == (KvRelease(0),)  # type: ignore[union-attr]


def test_a_copy_that_may_not_have_been_done_is_not_kept() -> None:
    scheduler = make_scheduler()
    finish(scheduler, add(scheduler, 1, [*SYSTEM, *range(40)]))
    two = add(scheduler, 2, [*SYSTEM, 1, 2, 3])
    plan = scheduler.schedule()
    assert plan is not None and plan.kv_ops == (KvCopy(0, 1, 30),)
    scheduler.cancel(two.seq_id)
    scheduler.fail(plan)
    scheduler.check_integrity()
    assert step(scheduler).kv_ops == (KvRelease(1),)


def test_a_higher_priority_interrupts_and_nothing_is_lost() -> None:
    scheduler = make_scheduler(max_slots=1)
    low = add(scheduler, 1, SYSTEM, new=6)
    step(scheduler)
    step(scheduler)
    high = add(scheduler, 2, [1, 2], priority=1)
    assert [r.seq_id for r in step(scheduler).rows] == [2]
    assert low.state is SequenceState.WAITING and low.generated_len == 2
    finish(scheduler, high)
    plan = step(scheduler)
    assert [(r.seq_id, r.past_len, len(r.tokens)) for r in plan.rows] == [(1, 0, 32)]
    finish(scheduler, low)
    assert low.generated_len == 6


def test_an_interrupted_sequence_finds_its_kv() -> None:
    """The budget made it stop, not the slots, and nobody needed its room after all."""
    scheduler = make_scheduler(kv_budget_tokens=60)
    low = add(scheduler, 1, SYSTEM, new=10)
    step(scheduler)
    high = add(scheduler, 2, [1, 2], new=19, priority=1)
    assert step(scheduler).kv_ops == ()
    scheduler.cancel(high.seq_id)
    plan = step(scheduler)
    assert [(r.seq_id, r.past_len, len(r.tokens)) for r in plan.rows] == [(1, 30, 1)]
    finish(scheduler, low)


def test_nobody_waits_much_longer_than_the_turns_before_it() -> None:
    """Endless sequences in every slot, and more behind them: all get on."""
    scheduler = make_scheduler(Fairness(quantum_steps=10), max_slots=2, kv_budget_tokens=10_000)
    ones = [add(scheduler, i, [i], new=150) for i in range(6)]
    for _ in range(2 * 10 * 3):
        step(scheduler)
    assert all(one.generated_len > 0 for one in ones)


def test_priorities_come_first_among_the_waiting() -> None:
    scheduler = make_scheduler(max_slots=1)
    first = add(scheduler, 1, [1], new=1)
    add(scheduler, 2, [2])
    add(scheduler, 3, [3], priority=-1)
    add(scheduler, 4, [4])
    order = []
    while scheduler.has_work:
        for row in step(scheduler).rows:
            if not order or order[-1] != row.seq_id:
                order.append(row.seq_id)
    assert order == [1, 2, 4, 3] and first.state is SequenceState.FINISHED


def test_what_was_found_may_have_to_go_for_what_is_interrupted() -> None:
    scheduler = make_scheduler(max_slots=3, kv_budget_tokens=100, prefix_cache_tokens=40)
    finish(scheduler, add(scheduler, 1, [*SYSTEM, 5]))
    low = add(scheduler, 2, list(range(200, 232)), new=10)
    step(scheduler)
    step(scheduler)
    add(scheduler, 3, [*SYSTEM, 6], new=40, priority=1)
    plan = step(scheduler)
    assert low.state is SequenceState.WAITING
    assert plan.kv_ops == (KvRelease(0), KvRelease(1))
    assert [(r.seq_id, r.slot, r.past_len) for r in plan.rows] == [(3, 0, 0)]
