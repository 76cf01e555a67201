"""Stages that work at the same time, each on a thread of its own, on calls that flow through them.

    caller -> ring -> stage 0 -> ring -> stage 1 -> ring -> caller

A stage takes calls in their order, so its part of the cache is written as if it were alone. What
raises in one of them ends all: what was under way is lost, and the caller hears of that error.
"""

from __future__ import annotations

import threading
from typing import Protocol

from headrace.runtime.errors import BackendError
from headrace.runtime.ring import Ring, RingClosedError


class Call(Protocol):
    """Something that every stage does a part of."""

    def run_stage(self, number: int) -> None: ...


class StageThreads:
    """Runs calls; used by one thread, which takes out what it puts in.

    Attributes:
        max_calls: that may be under way; enough for every stage to have one and one waiting.
    """

    def __init__(self, num_stages: int) -> None:
        self.max_calls = 2 * num_stages
        self._rings: list[Ring[Call]] = [Ring(self.max_calls) for _ in range(num_stages + 1)]
        self._threads = [
            threading.Thread(target=self._run, args=(n,), name=f"headrace-stage-{n}", daemon=True)
            for n in range(num_stages)
        ]
        for thread in self._threads:
            thread.start()

    def push(self, call: Call) -> None:
        """Start a call; at most `max_calls` are under way.

        Raises:
            whatever a stage has raised.
        """
        try:
            self._rings[0].push(call)
        except RingClosedError as closed:
            raise _cause(closed) from None

    def pop(self) -> Call:
        """Wait for the call that was started first.

        Raises:
            whatever a stage has raised.
        """
        try:
            return self._rings[-1].pop()
        except RingClosedError as closed:
            raise _cause(closed) from None

    def close(self) -> None:
        """Wait for what is being run, and end the threads. Calling it again does nothing."""
        self._end(None)
        for thread in self._threads:
            thread.join()

    def _end(self, error: BaseException | None) -> None:
        for ring in self._rings:
            ring.close(error)

    def _run(self, number: int) -> None:
        try:
            for call in self._rings[number]:
                call.run_stage(number)
                self._rings[number + 1].push(call)
        except RingClosedError:
            return  # another stage failed, or nobody takes anything any more
        except BaseException as error:
            self._end(error)


def _cause(closed: RingClosedError) -> BaseException:
    return closed.__cause__ or BackendError("the stages were closed")
