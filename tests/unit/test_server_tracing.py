"""Spans of requests: what they say, which trace they belong to, and that they may be absent."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from server_samples import WAIT_S, GatedBackend, Serving, fake_model, serving
from test_server_budget import PATH, Gate, one_at_a_time, writes
from test_server_clients import until
from tiny_bert import write_tiny_bert

from headrace.exporters.encoder_package import export_encoder
from headrace.runtime import Embedder
from headrace.runtime.server.residents import Served
from headrace.runtime.server.tracing import Tracing

pytest.importorskip("opentelemetry.sdk", reason="the SDK of OpenTelemetry is not installed")

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

MESSAGES: Any = [{"role": "user", "content": "secret"}]
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ASKED_BY = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


class Spans:
    """What was recorded."""

    def __init__(self) -> None:
        self.provider = TracerProvider()
        self._exporter = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def take(self) -> ReadableSpan:
        """The next one, which is over a moment after the client has its answer."""
        deadline = time.monotonic() + WAIT_S
        while not (found := self._exporter.get_finished_spans()):
            assert time.monotonic() < deadline, "there is no span"
            time.sleep(0.005)
        self._exporter.clear()
        (span,) = found
        assert "secret" not in span.to_json()
        return span

    def none(self) -> bool:
        return not self._exporter.get_finished_spans()


@pytest.fixture(scope="module")
def spans() -> Iterator[Spans]:
    made = Spans()
    with pytest.MonkeyPatch.context() as patch:  # a real one can be set once a process
        patch.setattr(trace, "get_tracer_provider", lambda: made.provider)
        yield made


@pytest.fixture(scope="module")
def server(spans: Spans, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("encoder")
    export_encoder(write_tiny_bert(folder / "source"), folder / "minilm", precision="fp32")
    encoder = folder / "minilm"
    minilm = Served(lambda: Embedder.load(encoder), Embedder)
    with serving({"fake": fake_model(), "minilm": minilm}) as running:
        yield running


def attributes(span: ReadableSpan) -> dict[str, Any]:
    """But for those that all have."""
    found = dict(span.attributes or {})
    assert found.pop("gen_ai.provider.name") == "headrace"
    operation, model = found.pop("gen_ai.operation.name"), found.pop("gen_ai.request.model")
    assert span.name == f"{operation} {model}" and found.pop("gen_ai.response.model") == model
    return found


def test_a_chat(server: Serving, spans: Spans) -> None:
    body = {"model": "fake", "messages": MESSAGES, "max_tokens": 5, "temperature": 0.5, "seed": 3}
    answer = server.post("/v1/chat/completions", body, headers=ASKED_BY).json()
    span = spans.take()
    assert span.name == "chat fake" and span.kind is trace.SpanKind.SERVER
    assert span.parent is not None and span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == PARENT
    assert span.status.status_code is trace.StatusCode.UNSET
    assert attributes(span) == {
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 3,
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ("length",),
    }


def test_several_answers_in_a_stream(server: Serving, spans: Spans) -> None:
    body = {
        "model": "fake",
        "prompt": ["secret", "other secret"],
        "max_tokens": 4,
        "n": 2,
        "stop": "~",
        "ignore_eos": True,
        "seed": 2**64 - 1,  # more than an attribute can say
        "stream": True,
    }
    assert "[DONE]" in server.post("/v1/completions", body).text
    span = spans.take()
    found = attributes(span)
    assert span.name == "text_completion fake" and span.parent is None
    assert 0 < found.pop("gen_ai.response.time_to_first_chunk") < WAIT_S
    assert found.pop("gen_ai.usage.cache_read.input_tokens") >= 0
    ids = [server.runtime("fake").tokenizer.encode_prompt(text) for text in body["prompt"]]
    assert found == {
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.stream": True,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stop_sequences": ("~",),
        "gen_ai.usage.input_tokens": sum(map(len, ids)),
        "gen_ai.usage.output_tokens": 16,
        "gen_ai.response.finish_reasons": ("length",) * 4,
    }


def test_responses_and_vectors(server: Serving, spans: Spans) -> None:
    server.post("/v1/responses", {"model": "fake", "input": "secret", "max_output_tokens": 3})
    found = spans.take()
    assert found.name == "chat fake"
    assert attributes(found)["gen_ai.usage.output_tokens"] == 3
    answer = server.post("/v1/embeddings", {"model": "minilm", "input": ["secret"]}).json()
    found = spans.take()
    assert found.name == "embeddings minilm"
    assert attributes(found) == {
        "gen_ai.request.encoding_formats": ("float",),
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
    }


def test_what_fails(server: Serving, spans: Spans) -> None:
    body = {"model": "fake", "prompt": "secret" * 1000}
    assert server.post("/v1/completions", body).status_code == 400
    span = spans.take()
    assert span.status.status_code is trace.StatusCode.ERROR
    assert attributes(span) == {"error.type": "400"}
    assert server.post("/v1/completions", {"model": "absent", "prompt": "a"}).status_code == 404
    assert spans.none()  # it reached no model


def waits_s(span: ReadableSpan) -> list[float]:
    """From the beginning of a span to where its model was there."""
    assert span.start_time is not None
    found = [event for event in span.events if event.name == "headrace.model_ready"]
    return [(event.timestamp - span.start_time) / 1e9 for event in found]


def test_the_wait_for_a_model(spans: Spans) -> None:
    gate = Gate(writes("b"))
    body = {"model": "b", "prompt": "secret", "stream": True}
    with serving(**one_at_a_time(writes("a"), gate)) as running, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(running.post, PATH, body)
        assert gate.asked.wait(WAIT_S)
        waited_s = 0.02
        time.sleep(waited_s)
        gate.open.set()
        assert asked.result().status_code == 200
        span = spans.take()
        (wait_s,) = waits_s(span)
        first_s = attributes(span)["gen_ai.response.time_to_first_chunk"]
        assert waited_s <= wait_s and waited_s <= first_s
        running.post(PATH, {**body, "stream": False})
        assert len(waits_s(spans.take())) == 1


def test_a_model_that_does_not_come(spans: Spans) -> None:
    backend = GatedBackend(max_slots=16)
    options = one_at_a_time(fake_model(backend))
    with serving(**options, wait_s=0.05) as running, ThreadPoolExecutor(1) as pool:
        first = pool.submit(running.post, PATH, {"model": "a", "prompt": "a", "max_tokens": 2})
        until(lambda: backend.started == 1)
        assert running.post(PATH, {"model": "b", "prompt": "secret"}).status_code == 503
        span = spans.take()
        assert span.name == "text_completion b" and not waits_s(span)
        assert attributes(span) == {"error.type": "503"}
        backend.let_through(1000)
        assert first.result().status_code == 200
        spans.take()


def test_a_client_that_leaves(spans: Spans) -> None:
    backend = GatedBackend()
    body = {"prompt": "secret", "stream": True, "ignore_eos": True}
    with serving({"fake": fake_model(backend)}) as running:
        backend.let_through(2)
        with running.http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
        backend.let_through(2)
        span = spans.take()
        backend.let_through(1000)
    assert span.status.status_code is trace.StatusCode.UNSET
    found = attributes(span)
    assert found["gen_ai.response.finish_reasons"] == ()
    assert found["gen_ai.usage.output_tokens"] > 0


def test_within_a_span_of_somebody_else(spans: Spans) -> None:
    tracing, tracer = Tracing(), spans.provider.get_tracer("other")
    with tracer.start_as_current_span("outer") as outer:
        with tracing.span(ASKED_BY, "chat", "fake", {}):
            pass
        inner = spans.take()
    spans.take()
    assert inner.kind is trace.SpanKind.INTERNAL
    assert inner.parent is not None and inner.parent.span_id == outer.get_span_context().span_id


def test_without_opentelemetry(monkeypatch: pytest.MonkeyPatch, spans: Spans) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.setitem(sys.modules, name, None)
    with serving({"fake": fake_model()}) as running:
        answer = running.post("/v1/completions", {"prompt": "a", "max_tokens": 2}, headers=ASKED_BY)
        assert answer.json()["usage"]["completion_tokens"] == 2
    assert spans.none()
