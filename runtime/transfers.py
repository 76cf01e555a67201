"""Keys and values on their way in or out: promises that a later step keeps."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from headrace.runtime.core import KvRead, KvWrite, StepPlan

Transfer = KvRead | KvWrite


class Transfers:
    """What was asked of coming steps. Belongs to the engine's thread."""

    def __init__(self) -> None:
        self._promises: list[tuple[Transfer, Future[bytes]]] = []

    def expect(self, op: Transfer) -> Future[bytes]:
        """A promise for an operation of the next plan: what it reads, empty for a write."""
        promise: Future[bytes] = Future()
        self._promises.append((op, promise))
        return promise

    def settle(self, plan: StepPlan, reads: Sequence[bytes]) -> None:
        """The step was done, and its reads gave this."""
        done: dict[int, bytes] = {}
        remaining = iter(reads)
        for op in plan.kv_ops:
            if isinstance(op, Transfer):
                done[id(op)] = next(remaining) if isinstance(op, KvRead) else b""
        waiting, self._promises = self._promises, []
        for op, promise in waiting:
            if id(op) in done:
                promise.set_result(done[id(op)])
            else:
                self._promises.append((op, promise))

    def fail(self, error: Exception) -> None:
        """Nothing that was asked will come."""
        waiting, self._promises = self._promises, []
        for _, promise in waiting:
            promise.set_exception(error)
