"""Figures for Prometheus, in a registry of the server's own."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import generate_latest

from headrace.runtime.api import Runtime
from headrace.runtime.completion import TokenDelta
from headrace.runtime.server.models import Models

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
_STEP_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
_NATS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8)


class Metrics:
    """Counts for the event loop's thread. What engines log is read when it is asked for, and in
    between (`read_steps`), since they keep their newest steps only."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._last_step: dict[str, tuple[int, int]] = {}  # with the load that it belongs to
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter(
            "headrace_http_requests", "Answered", ["path", "status"], registry=registry
        )
        self.in_progress = Gauge(
            "headrace_requests_in_progress", "Being read, waiting or answered", registry=registry
        )
        model = ["model"]
        self._prompt_tokens = Counter(
            "headrace_prompt_tokens", "Of requests that began", model, registry=registry
        )
        self._new_tokens = Counter("headrace_new_tokens", "Generated", model, registry=registry)
        self._finished = Counter(
            "headrace_answers", "Ended, by reason", ["model", "reason"], registry=registry
        )
        self._first_token = Histogram(
            "headrace_first_token_seconds",
            "From the request to its first token",
            model,
            buckets=_SECONDS,
            registry=registry,
        )
        self._entropy = Histogram(
            "headrace_token_entropy_nats",
            "Of what each token was drawn from",
            model,
            buckets=_NATS,
            registry=registry,
        )
        self._step = Histogram(
            "headrace_step_seconds", "A step", model, buckets=_STEP_SECONDS, registry=registry
        )
        self._rows = Counter("headrace_rows", "Sequences in steps", model, registry=registry)
        self._drafted = Counter("headrace_drafted_tokens", "Guessed", model, registry=registry)
        self._accepted = Counter(
            "headrace_accepted_tokens", "Guessed rightly", model, registry=registry
        )
        self._loads = Gauge(
            "headrace_model_loads", "How often it was loaded", model, registry=registry
        )
        self._loaded = Gauge(
            "headrace_model_loaded", "1 where it is in memory", model, registry=registry
        )
        self._running = Gauge("headrace_running", "Answers with a slot", model, registry=registry)
        self._waiting = Gauge(
            "headrace_waiting", "Answers that wait for one", model, registry=registry
        )

    async def observed(
        self, model: str, deltas: AsyncGenerator[TokenDelta, None]
    ) -> AsyncGenerator[TokenDelta, None]:
        """The same deltas, counted."""
        start = time.perf_counter()
        is_first = True
        async with aclosing(deltas):
            async for delta in deltas:
                if is_first:
                    is_first = False
                    self._first_token.labels(model).observe(time.perf_counter() - start)
                    self._prompt_tokens.labels(model).inc(delta.prompt_tokens)
                self._new_tokens.labels(model).inc(len(delta.token_ids))
                observe = self._entropy.labels(model).observe
                for nats in delta.entropy_nats:
                    observe(nats)
                if delta.finish_reason is not None:
                    self._finished.labels(model, delta.finish_reason.value).inc()
                yield delta

    def read_steps(self) -> None:
        """Take in the steps that were run since the last time."""
        for model, runtime in self._runtimes():
            load, last = self._last_step.get(model, (0, -1))
            if load != self._models.num_loads(model):  # which counts its steps anew
                load, last = self._models.num_loads(model), -1
            for record in runtime.steps:
                if record.step_id <= last:
                    continue
                last = record.step_id
                self._step.labels(model).observe((record.model_ms + record.host_ms) / 1e3)
                self._rows.labels(model).inc(record.num_rows)
                self._drafted.labels(model).inc(record.drafted)
                self._accepted.labels(model).inc(record.accepted)
            self._last_step[model] = load, last

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        self.read_steps()
        loaded = self._models.loaded
        for model in self._models.names:
            self._loads.labels(model).set(self._models.num_loads(model))
            self._loaded.labels(model).set(model in loaded)
        for model in self._models.names_of(Runtime):
            runtime = loaded.get(model)
            running, waiting = runtime.occupancy if isinstance(runtime, Runtime) else (0, 0)
            self._running.labels(model).set(running)
            self._waiting.labels(model).set(waiting)
        return generate_latest(self.registry)

    def _runtimes(self) -> Iterable[tuple[str, Runtime]]:
        return [(n, m) for n, m in self._models.loaded.items() if isinstance(m, Runtime)]
