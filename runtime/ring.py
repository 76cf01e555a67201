"""A ring between two threads: one pushes, one pops, neither takes a lock while the other keeps up.

Slots are made once. Each has a number that says whose turn it is: 2n, it is free for item n;
2n + 1, it holds item n. So the sides share nothing but the slot that both have come to.

A side that has to wait blocks in C, on a bell that the other rings if it sees somebody asleep. To
spin in Python would hold the interpreter's lock, which the other side needs.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Generic, TypeVar

from headrace.runtime.errors import HeadraceError

T = TypeVar("T")


class RingClosedError(HeadraceError):
    """Nothing more will come, or will be taken. Its cause is what the ring was closed with."""


class Ring(Generic[T]):
    """Items in order, `capacity` of them at most. One thread pushes and one pops; any closes."""

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self._items: list[T | None] = [None] * capacity
        self._turns = [2 * n for n in range(capacity)]
        self._num_pushed = 0  # the producer's
        self._num_popped = 0  # the consumer's
        self._pushed, self._popped = _Bell(), _Bell()
        self._is_closed = False
        self._error: BaseException | None = None

    def push(self, item: T) -> None:
        """Put an item behind the others; waits while the ring is full.

        Raises:
            RingClosedError: it was closed.
        """
        number, turns = self._num_pushed, self._turns
        slot = number % len(turns)
        while turns[slot] != 2 * number and not self._is_closed:
            self._popped.is_awaited = True
            if turns[slot] != 2 * number and not self._is_closed:
                self._popped.wait()
        if self._is_closed:
            raise RingClosedError("nothing is taken any more") from self._error
        self._items[slot] = item
        turns[slot] = 2 * number + 1
        self._num_pushed = number + 1
        if self._pushed.is_awaited:
            self._pushed.ring()

    def pop(self) -> T:
        """Take the first item; waits while there is none.

        Raises:
            RingClosedError: it was closed, and what was pushed before has been taken.
        """
        number, turns = self._num_popped, self._turns
        slot = number % len(turns)
        while turns[slot] != 2 * number + 1:
            self._pushed.is_awaited = True
            was_closed = self._is_closed  # before the last look: items may come until then
            if turns[slot] == 2 * number + 1:
                break
            if was_closed:
                raise RingClosedError("nothing more comes") from self._error
            self._pushed.wait()
        item, self._items[slot] = self._items[slot], None
        turns[slot] = 2 * (number + len(turns))
        self._num_popped = number + 1
        if self._popped.is_awaited:
            self._popped.ring()
        return item  # type: ignore[return-value]  # None where T is

    def close(self, error: BaseException | None = None) -> None:
        """Let pushes fail from now on, and pops once the ring is empty; wakes who waits.

        The first error counts: it is the cause of what they raise.
        """
        self._error = self._error or error
        self._is_closed = True
        self._pushed.ring()
        self._popped.ring()

    def __iter__(self) -> Iterator[T]:
        """Pop until the ring is closed.

        Raises:
            RingClosedError: with an error.
        """
        while True:
            try:
                item = self.pop()
            except RingClosedError:
                if self._error is not None:
                    raise
                return
            yield item


class _Bell:
    """Wakes one thread. Rung too often it wakes it once for nothing, so sleepers look again."""

    def __init__(self) -> None:
        self.is_awaited = False
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()

    def wait(self) -> None:
        self._calls.get()

    def ring(self) -> None:
        self.is_awaited = False
        self._calls.put(None)
