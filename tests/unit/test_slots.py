from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.runtime.scheduling.slots import SlotPool


def test_lowest_free_slot_comes_first() -> None:
    pool = SlotPool(4, 100)
    assert [pool.acquire(owner, 10) for owner in range(4)] == [0, 1, 2, 3]
    pool.release(2)
    pool.release(0)
    assert [pool.acquire(owner, 10) for owner in (7, 8)] == [0, 2]
    assert pool.owner(0) == 7 and pool.owner(2) == 8


def test_budget_and_slots_both_limit() -> None:
    pool = SlotPool(2, 10)
    pool.acquire(1, 6)
    assert not pool.fits(5) and pool.fits(4)
    pool.acquire(2, 4)
    assert not pool.fits(0)
    pool.release(0)
    assert pool.fits(6) and pool.owner(0) is None


def test_releasing_twice_is_a_mistake_of_ours() -> None:
    pool = SlotPool(2, 10)
    pool.acquire(1, 1)
    pool.release(0)
    with pytest.raises(KeyError):
        pool.release(0)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=60))
def test_any_order_keeps_the_books(actions: list[tuple[bool, int]]) -> None:
    pool = SlotPool(5, 100)
    owned: list[int] = []
    for owner, (acquire, amount) in enumerate(actions):
        if acquire and pool.fits(amount):
            slot = pool.acquire(owner, amount)
            assert slot == min(set(range(5)) - set(owned))
            owned.append(slot)
        elif owned:
            pool.release(owned.pop(amount % len(owned)))
        pool.check_integrity()
        assert pool.num_free == 5 - len(owned)
