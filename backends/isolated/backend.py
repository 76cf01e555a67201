"""A backend that runs in a process of its own, where a crash takes nothing else with it.

    engine --StepPlan--> pipe --> process: any backend --> pipe --StepOutput--> engine

The engine, its scheduler, sampling, grammars and texts stay where they are; the process has what is
native and large: ONNX Runtime, the weights, keys and values. When it dies the step in hand raises
EngineProcessError, and the next one starts another, whose slots are empty.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from headrace.backends.base import Capabilities, StepOutput
from headrace.backends.isolated.values import (
    decode_capabilities,
    decode_error,
    decode_output,
    encode_plan,
    max_output_bytes,
)
from headrace.runtime.child.entry import Link
from headrace.runtime.child.process import ChildProcess
from headrace.runtime.config import EngineConfig
from headrace.runtime.core import StepPlan
from headrace.runtime.errors import BackendError, EngineProcessError


class Child(Link, Protocol):
    """What is needed of `runtime.child.process.ChildProcess`."""

    def close(self) -> None: ...


class IsolatedBackend:
    """See `backends.base.Backend` for the contract of the four methods.

    Args:
        device: as `Runtime.load` takes it.
        start: starts a child that runs `serve.serve`.
    """

    def __init__(
        self,
        device: str,
        folder: Path,
        config: EngineConfig,
        start: Callable[[], Child] = lambda: ChildProcess("engine"),
    ) -> None:
        self._device, self._folder, self._start = device, folder, start
        self._config = replace(config, isolated=False, draft_package=None)
        self._child: Child | None = None
        self._caps: Capabilities | None = None
        self._closed = False
        self._next_ticket = 0
        self._in_flight: deque[tuple[int, StepPlan]] = deque()

    def load(self) -> Capabilities:
        self._caps = self._load(self._config)
        return self._caps

    def submit(self, plan: StepPlan) -> int:
        if self._closed or self._caps is None:
            raise BackendError("the backend is not loaded or was closed")
        child = self._child or self._load_again(self._caps)
        header, body = encode_plan(plan)
        with self._watched():
            child.send(header, *body)
        self._next_ticket += 1
        self._in_flight.append((self._next_ticket, plan))
        return self._next_ticket

    def collect(self, ticket: int) -> StepOutput:
        """See `Backend`; the arrays are valid until the next `collect`."""
        child, caps = self._child, self._caps
        if child is None or caps is None:
            raise EngineProcessError("the engine process is gone, and this step with it")
        expected, plan = self._in_flight.popleft()
        assert ticket == expected
        with self._watched():
            frame = child.receive(max_output_bytes(plan, caps))
            if "error" in frame.header:
                raise decode_error(frame.header["error"])
            return decode_output(frame.header, frame.body, caps)

    def close(self) -> None:
        self._closed = True
        self._end_child()

    def _load(self, config: EngineConfig) -> Capabilities:
        child = self._child = self._start()
        with self._watched():
            child.send(
                {
                    "device": self._device,
                    "folder": str(self._folder.absolute()),
                    "config": config.to_dict(),
                }
            )
            answer = child.receive(0).header
            if "capabilities" in answer:
                return decode_capabilities(answer["capabilities"])
            self._end_child()
            raise decode_error(answer.get("error"))

    def _load_again(self, caps: Capabilities) -> Child:
        """Another process, with what the scheduler was told of the first."""
        budget_bytes = caps.kv_budget_tokens * caps.kv_bytes_per_token
        again = self._load(replace(self._config, kv_budget_bytes=budget_bytes))
        if replace(again, name=caps.name) != caps or self._child is None:
            self._end_child()
            raise BackendError(f"{self._folder} was changed while it was in use; load it again")
        return self._child

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Whatever a process that died or went mad was doing is over."""
        try:
            yield
        except EngineProcessError:
            self._end_child()
            raise

    def _end_child(self) -> None:
        self._in_flight.clear()
        child, self._child = self._child, None
        if child is not None:
            child.close()
