"""What each path does."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.runtime.api import Runtime
from headrace.runtime.encoder.embedder import Embedder
from headrace.runtime.server import generate
from headrace.runtime.server.lanes import LiveView
from headrace.runtime.server.leases import held_by
from headrace.runtime.server.metrics import Metrics
from headrace.runtime.server.models import Models
from headrace.runtime.server.options import ServerOptions
from headrace.runtime.server.problems import ApiError
from headrace.runtime.server.reply import ChatReply, CompletionReply, Reply
from headrace.runtime.server.responses import ResponseReply, as_chat
from headrace.runtime.server.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    ResponsesBody,
    Sampling,
    TokenizeBody,
)
from headrace.runtime.server.stream import EventStream, unless_gone
from headrace.runtime.server.tracing import Question, RequestSpan, Tracing

Kind = TypeVar("Kind", Runtime, Embedder)

_READ_STEPS_S = 1.0


class Service:
    """What the routes share."""

    def __init__(self, models: Models, options: ServerOptions) -> None:
        self.models, self.options = models, options
        self.metrics = Metrics(models)
        models.when_unloading(self.metrics.read_steps)
        self._live_view, self._tracing = LiveView(models), Tracing()
        self._embedding = asyncio.Lock()  # one call at a time has all threads

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Keep the metrics up to date while the application runs."""
        task = asyncio.create_task(self._read_steps())
        try:
            yield
        finally:
            task.cancel()

    async def _read_steps(self) -> None:
        while True:
            await asyncio.sleep(_READ_STEPS_S)
            self.metrics.read_steps()

    async def health(self, request: Request) -> Response:
        status = self.models.status
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def metrics_text(self, request: Request) -> Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self.metrics.render(), headers={"content-type": kind})

    async def lanes(self, request: Request) -> Response:
        query = request.query_params
        return JSONResponse(self._live_view.read(query.get("model"), query.get("after")))

    async def list_models(self, request: Request) -> Response:
        data = [self._describe(name) for name in self.models.names]
        return JSONResponse({"object": "list", "data": data})

    async def show_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.models.names:
            message = f"there is no model {name[:100]!r} here"
            raise ApiError(404, message, code="model_not_found", param="model")
        return JSONResponse(self._describe(name))

    async def chat(self, request: Request, body: ChatBody) -> Any:
        name = self.models.find(body.model, Runtime)
        config = generate.chat_config(body, self.options.max_tokens)
        messages, choice = generate.plain_messages(body.messages), generate.tool_choice_of(body)
        question = Question("chat", name, config, bool(body.stream))
        runtime, span = await self._asked(request, question)
        streams = [generate.chat_deltas(runtime, messages, config, body.tools or None, choice)]
        deltas = self._observed(span, question, streams)
        reply = ChatReply(
            name,
            runtime.tokenizer.token_bytes,
            has_logprobs=bool(body.logprobs),
            has_details=body.headrace.token_details,
            one_call=body.parallel_tool_calls is False,
        )
        return await self._reply(request, body, reply, deltas)

    async def complete(self, request: Request, body: CompletionBody) -> Any:
        name = self.models.find(body.model, Runtime)
        config = generate.completion_config(body, self.options.max_tokens)
        prompts = generate.prompts_of(body)
        question = Question("text_completion", name, config, bool(body.stream))
        runtime, span = await self._asked(request, question)
        streams = [generate.completion_deltas(runtime, prompt, config) for prompt in prompts]
        deltas = self._observed(span, question, streams)
        reply = CompletionReply(
            name,
            runtime.tokenizer.token_bytes,
            has_logprobs=body.logprobs is not None,
            has_details=body.headrace.token_details,
        )
        return await self._reply(request, body, reply, deltas)

    async def respond(self, request: Request, body: ResponsesBody) -> Any:
        chat = as_chat(body)
        name = self.models.find(chat.model, Runtime)
        config = generate.chat_config(chat, self.options.max_tokens)
        messages = generate.plain_messages(chat.messages)
        question = Question("chat", name, config, bool(body.stream))
        runtime, span = await self._asked(request, question)
        streams = [generate.chat_deltas(runtime, messages, config, None, "auto")]
        deltas = self._observed(span, question, streams)
        reply = ResponseReply(name, body)
        if body.stream:
            return await self._stream(request, reply.events(deltas))
        return JSONResponse(await unless_gone(request.receive, reply.whole(deltas)))

    async def embed(self, request: Request, body: EmbeddingBody) -> Response:
        name = self.models.find(body.model, Embedder)
        texts = [body.input] if isinstance(body.input, str) else body.input
        told = {"gen_ai.request.encoding_formats": [body.encoding_format]}
        with self._tracing.span(request.headers, "embeddings", name, told) as span:
            embedder = await self._model(request, name, Embedder)
            span.tell_model_is_there()
            if body.dimensions not in (None, embedder.dim):
                message = f"vectors of {name} have {embedder.dim} dimensions"
                raise ApiError(400, message, param="dimensions")
            async with self._embedding:
                work = asyncio.to_thread(embedder.embed_all, texts)
                found = await unless_gone(request.receive, work)
            num_tokens = sum(found.num_tokens)
            span.tell({"gen_ai.usage.input_tokens": num_tokens})
        as_base64 = body.encoding_format == "base64"
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(vector.astype("<f4").tobytes()).decode()
                if as_base64
                else vector.tolist(),
            }
            for index, vector in enumerate(found.vectors)
        ]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return JSONResponse({"object": "list", "data": data, "model": name, "usage": usage})

    async def tokenize(self, request: Request, body: TokenizeBody) -> Response:
        runtime = await self._model(request, body.model, Runtime)
        ids = await asyncio.to_thread(runtime.tokenizer.encode_prompt, body.prompt)
        limit = runtime.capabilities.context_tokens
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": limit})

    async def detokenize(self, request: Request, body: DetokenizeBody) -> Response:
        runtime = await self._model(request, body.model, Runtime)
        vocab_size = runtime.capabilities.vocab_size
        if beyond := [token for token in body.tokens if not 0 <= token < vocab_size]:
            message = f"token {beyond[0]} is not one of the {vocab_size} of the vocabulary"
            raise ApiError(400, message, param="tokens")
        data = b"".join(map(runtime.tokenizer.token_bytes, body.tokens))
        return JSONResponse({"prompt": data.decode("utf-8", "replace")})

    def _observed(
        self, span: RequestSpan, question: Question, streams: list[generate.Deltas]
    ) -> generate.NumberedDeltas:
        """The deltas of all streams, counted and traced."""
        counted = [self.metrics.observed(question.model, deltas) for deltas in streams]
        return span.followed(generate.numbered(counted), streamed=question.streamed)

    async def _asked(self, request: Request, question: Question) -> tuple[Runtime, RequestSpan]:
        """The model of a question, and a span from before it is there until the request ends.

        Raises:
            ApiError, ClientGoneError: as `_model`.
        """
        span = self._tracing.of(request.headers, question)
        held_by(request).callback(span.end)  # where nobody asks for the first delta
        try:
            runtime = await self._model(request, question.model, Runtime)
        except Exception as error:
            span.fail(error)
            raise
        span.tell_model_is_there()
        return runtime, span

    async def _model(self, request: Request, name: str | None, kind: type[Kind]) -> Kind:
        """The model that a request asks for; it is there until the request ends.

        Raises:
            ApiError: as `Models.lease`.
            ClientGoneError: the client left before it was there.
        """

        async def hold() -> Kind:
            lease = await self.models.lease(name, kind)
            held_by(request).callback(lease.release)
            assert isinstance(lease.model, kind)
            return lease.model

        return await unless_gone(request.receive, hold())

    async def _reply(
        self,
        request: Request,
        body: Sampling,
        reply: Reply,
        deltas: generate.NumberedDeltas,
    ) -> Any:
        """The whole answer, or a stream that has its first event already: what is refused, is
        refused with a status."""
        num_each = body.n or 1
        if not body.stream:
            work = generate.whole_answer(reply, deltas, num_each)
            return JSONResponse(await unless_gone(request.receive, work))
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        events = generate.answer_events(reply, deltas, num_each, include_usage)
        return await self._stream(request, events)

    async def _stream(self, request: Request, events: AsyncGenerator[bytes, None]) -> EventStream:
        try:
            first = await unless_gone(request.receive, _next(events))
        except BaseException:
            await events.aclose()
            raise
        return EventStream(
            first,
            events,
            buffer_bytes=self.options.max_buffer_bytes,
            timeout_s=self.options.client_timeout_s,
        )

    def _describe(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.models.created_s,
            "owned_by": "headrace",
        }


async def _next(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)
