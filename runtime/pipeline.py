"""What an engine's thread does over and over, in order or with two steps overlapping.

In order, the text of a step is made and delivered before the next one starts. Overlapped, the next
one starts first, on a backend that works beside this thread, and text is made meanwhile:

    engine thread   schedule n+1 | text of n, delivery | wait | sample n+1 | schedule n+2 | ...
    backend                      |------- model runs n+1 -----|              |--- n+2 ...

A stop string is then found one step late: what the model did behind it is dropped unseen. Tokens
are the same either way, since what a sequence draws depends on its own tokens alone. No more than
one step can run, for the next one begins with the tokens of this one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from headrace.backends.base import Backend, Capabilities, StepOutput
from headrace.runtime.answer import StepEvent
from headrace.runtime.core import StepPlan
from headrace.runtime.engine import Engine
from headrace.runtime.errors import BackendError
from headrace.runtime.ring import Ring, RingClosedError

Deliver = Callable[[list[StepEvent]], None]


def step_in_order(engine: Engine, deliver: Deliver) -> None:
    """The specification of `step_overlapped`."""
    deliver(engine.step())


def step_overlapped(engine: Engine, deliver: Deliver) -> None:
    """Start a step, deliver the one before, and finish it."""
    engine.start()
    deliver(engine.read())
    deliver(engine.finish())


class ThreadedBackend:
    """A backend whose steps run on a thread of their own, so that `submit` returns at once.

    Args:
        backend: not loaded yet; closed with this one. Its `submit` may block.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._plans: Ring[StepPlan] = Ring(1)
        self._outputs: Ring[StepOutput | Exception] = Ring(1)
        self._thread: threading.Thread | None = None
        self._num_submitted = 0

    def load(self) -> Capabilities:
        capabilities = self._backend.load()
        self._thread = threading.Thread(target=self._run, name="headrace-model", daemon=True)
        self._thread.start()
        return capabilities

    def submit(self, plan: StepPlan) -> int:
        try:
            self._plans.push(plan)
        except RingClosedError:
            raise BackendError("the backend was closed") from None
        self._num_submitted += 1
        return self._num_submitted

    def collect(self, ticket: int) -> StepOutput:
        """See `Backend`; the arrays are valid until the next `submit`."""
        assert ticket == self._num_submitted, "one step is in flight at a time"
        try:
            output = self._outputs.pop()
        except RingClosedError:
            raise BackendError("the backend was closed") from None
        if isinstance(output, Exception):
            raise output
        return output

    def close(self) -> None:
        self._plans.close()
        self._outputs.close()
        if self._thread is not None:
            self._thread.join()  # a step that runs is waited for
        self._backend.close()

    def _run(self) -> None:
        for plan in self._plans:
            try:
                output: StepOutput | Exception = self._backend.collect(self._backend.submit(plan))
            except Exception as error:
                output = error
            try:
                self._outputs.push(output)
            except RingClosedError:
                return
