"""A span of OpenTelemetry for each request that asks for a model, where its API is installed.

It begins before the model is there, and an event says when it was: until then others had to give
way or it was loaded. Names are those of the semantic conventions for generative AI. No text of a
prompt or an answer is told. Where spans go is decided outside (`opentelemetry-instrument`, or who
embeds the application); until then, and without the API, nothing is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from headrace.runtime.server.generate import NumberedDeltas
from headrace.runtime.server.problems import ApiError
from headrace.runtime.server.reply import Usage, finish_reason
from headrace.runtime.server.stream import ClientGoneError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, SpanKind

Attributes = Mapping[str, Any]

# Fields of `GenerationConfig` -> attributes.
_CONFIG = {
    "max_new_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
}
_MODEL_READY = "headrace.model_ready"  # an event
_INT64_MAX = 2**63 - 1  # attributes are signed


@dataclass(frozen=True, slots=True)
class Question:
    """What a request asks of a model.

    Attributes:
        operation: as the conventions name it.
        model: its name.
        config: fields of `GenerationConfig` that the request sets.
        streamed: whether the answer comes piece by piece.
    """

    operation: str
    model: str
    config: Mapping[str, Any]
    streamed: bool

    @property
    def attributes(self) -> Attributes:
        """Of a span, before there is an answer."""
        config = self.config
        found = {_CONFIG[name]: value for name, value in config.items() if name in _CONFIG}
        if self.streamed:
            found["gen_ai.request.stream"] = True
        if config.get("n", 1) != 1:
            found["gen_ai.request.choice.count"] = config["n"]
        if (stop := config.get("stop")) is not None:
            found["gen_ai.request.stop_sequences"] = [stop] if isinstance(stop, str) else stop
        if config.get("seed", _INT64_MAX + 1) <= _INT64_MAX:
            found["gen_ai.request.seed"] = config["seed"]
        if "grammar" in config:  # a request can ask for no other than of JSON
            found["gen_ai.output.type"] = "json"
        return found


class RequestSpan:
    """A span until it is over, or nothing in its place.

    As a context manager it is over at the end, and says what was raised within.
    """

    def __init__(self, span: Span | None) -> None:
        self._span = span if span is not None and span.is_recording() else None
        self._start_s = time.perf_counter()

    def __enter__(self) -> RequestSpan:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self.fail(error)
        self.end()

    def tell(self, attributes: Attributes) -> None:
        """Add attributes."""
        if self._span is not None:
            self._span.set_attributes(attributes)

    def tell_model_is_there(self) -> None:
        """Add the event that ends the wait for it."""
        if self._span is not None:
            self._span.add_event(_MODEL_READY)

    def fail(self, error: Exception) -> None:
        """Say what went wrong; that a client left is no mistake."""
        if self._span is None or isinstance(error, ClientGoneError):
            return
        from opentelemetry.trace import StatusCode

        kind = str(error.status) if isinstance(error, ApiError) else type(error).__name__
        self._span.set_attribute("error.type", kind)
        self._span.set_status(StatusCode.ERROR)

    def end(self) -> None:
        """Idempotent."""
        span, self._span = self._span, None
        if span is not None:
            span.end()

    def followed(self, deltas: NumberedDeltas, *, streamed: bool) -> NumberedDeltas:
        """The same deltas; the span is over when they are, for whatever reason."""
        return deltas if self._span is None else self._follow(deltas, streamed)

    async def _follow(self, deltas: NumberedDeltas, streamed: bool) -> NumberedDeltas:
        usage = Usage()
        callers: set[tuple[int, int]] = set()
        reasons: dict[tuple[int, int], str] = {}
        first_s: float | None = None
        with self:
            try:
                async with aclosing(deltas):
                    async for prompt_index, delta in deltas:
                        first_s = first_s or time.perf_counter() - self._start_s
                        usage.add(prompt_index, delta)
                        answer = prompt_index, delta.index
                        if delta.tool_calls:
                            callers.add(answer)
                        if delta.finish_reason is not None:
                            reasons[answer] = finish_reason(delta.finish_reason, answer in callers)
                        yield prompt_index, delta
            finally:
                if first_s is not None:
                    self.tell(_usage(usage, [reasons[answer] for answer in sorted(reasons)]))
                    if streamed:
                        self.tell({"gen_ai.response.time_to_first_chunk": first_s})


class Tracing:
    """Makes spans. They belong to a span that is under way here already, or to the trace that a
    request names (by W3C's `traceparent`, unless the propagators were set otherwise)."""

    def __init__(self) -> None:
        try:
            from opentelemetry import propagate, trace
        except ImportError:
            self._trace = None
            return
        self._trace, self._propagate = trace, propagate
        self._tracer = trace.get_tracer("headrace", version("headrace"))

    def span(
        self, headers: Mapping[str, str], operation: str, model: str, attributes: Attributes
    ) -> RequestSpan:
        """A span that begins now."""
        if self._trace is None:
            return RequestSpan(None)
        context, kind = self._parent(headers)
        names = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "headrace",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
        }
        name = f"{operation} {model}"
        return RequestSpan(self._tracer.start_span(name, context, kind, {**names, **attributes}))

    def of(self, headers: Mapping[str, str], question: Question) -> RequestSpan:
        """A span, which begins now, of a question."""
        return self.span(headers, question.operation, question.model, question.attributes)

    def _parent(self, headers: Mapping[str, str]) -> tuple[Context | None, SpanKind]:
        """Whoever else has made a span of this request, here, has read its headers."""
        assert self._trace is not None
        if self._trace.get_current_span().get_span_context().is_valid:
            return None, self._trace.SpanKind.INTERNAL
        return self._propagate.extract(headers), self._trace.SpanKind.SERVER


def _usage(usage: Usage, reasons: list[str]) -> Attributes:
    return {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.response.finish_reasons": reasons,
    }
