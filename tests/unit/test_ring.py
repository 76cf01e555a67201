"""The ring: against a deque, between threads, closed at any time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.runtime.ring import Ring, RingClosedError

JOIN_S = 60.0


@given(
    capacity=st.integers(1, 5),
    moves=st.lists(st.one_of(st.integers(), st.none()), max_size=60),
    close_at=st.integers(0, 80),
)
def test_it_is_a_bounded_deque(capacity: int, moves: list[int | None], close_at: int) -> None:
    """A number is pushed where there is room, None pops where there is something."""
    ring: Ring[int] = Ring(capacity)
    model: deque[int] = deque()
    is_closed = False
    for step, move in enumerate(moves):
        if step == close_at:
            ring.close()
            is_closed = True
        if move is None and (model or is_closed):
            if model:
                assert ring.pop() == model.popleft()
            else:
                with pytest.raises(RingClosedError):
                    ring.pop()
        elif move is not None and is_closed:
            with pytest.raises(RingClosedError):
                ring.push(move)
        elif move is not None and len(model) < capacity:
            ring.push(move)
            model.append(move)
    ring.close()
    assert list(ring) == list(model)


def in_thread(work: Callable[[], None]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


def join(thread: threading.Thread) -> None:
    thread.join(JOIN_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("capacity", [1, 2, 7, 64])
def test_nothing_is_lost_or_overtakes_between_threads(capacity: int) -> None:
    """Both sides come to wait: in turns one of them is slower."""
    ring: Ring[int] = Ring(capacity)
    count = 20_000

    def dawdle(number: int, slow_half: int) -> None:
        if number // 500 % 2 == slow_half:
            sum(range(20))

    def produce() -> None:
        for number in range(count):
            dawdle(number, 0)
            ring.push(number)
        ring.close()

    thread, errors = in_thread(produce)
    taken = []
    for item in ring:
        dawdle(item, 1)
        taken.append(item)
    join(thread)
    assert not errors and taken == list(range(count))


def test_closing_frees_a_producer_that_waits_for_room() -> None:
    ring: Ring[int] = Ring(1)
    ring.push(0)
    thread, errors = in_thread(lambda: ring.push(1))
    cause = ValueError("the consumer is gone")
    ring.close(cause)
    join(thread)
    assert isinstance(errors[0], RingClosedError) and errors[0].__cause__ is cause
    assert ring.pop() == 0


def test_closing_frees_a_consumer_that_waits() -> None:
    ring: Ring[int] = Ring(2)
    thread, errors = in_thread(lambda: [*ring].clear())
    cause = ValueError("the producer failed")
    ring.close(cause)
    join(thread)
    assert isinstance(errors[0], RingClosedError) and errors[0].__cause__ is cause


def test_what_was_pushed_before_the_end_is_there_and_the_first_error_counts() -> None:
    ring: Ring[str] = Ring(3)
    ring.push("a")
    ring.push("b")
    first, second = ValueError("first"), ValueError("second")
    ring.close(first)
    ring.close(second)
    taken = []
    with pytest.raises(RingClosedError) as caught:
        for item in ring:
            taken.append(item)
    assert taken == ["a", "b"] and caught.value.__cause__ is first


def test_items_are_forgotten_when_taken() -> None:
    """A slot does not keep alive what was in it; None is an item like any other."""
    ring: Ring[object] = Ring(2)
    ring.push(None)
    ring.push(ring)
    assert ring.pop() is None and ring.pop() is ring
    assert ring._items == [None, None]
