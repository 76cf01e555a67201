"""The application: routes, and what they have in common."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace.runtime.api import Runtime
from headrace.runtime.completion import TokenDelta
from headrace.runtime.encoder.embedder import Embedder
from headrace.runtime.server import generate
from headrace.runtime.server.guard import Guard
from headrace.runtime.server.metrics import Metrics
from headrace.runtime.server.models import Models
from headrace.runtime.server.options import ServerOptions
from headrace.runtime.server.problems import ApiError, as_problem, as_refusal
from headrace.runtime.server.reply import ChatReply, CompletionReply, Reply
from headrace.runtime.server.schema import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    Sampling,
    TokenizeBody,
)
from headrace.runtime.server.stream import ClientGoneError, EventStream, unless_gone

logger = logging.getLogger(__name__)

BodyT = TypeVar("BodyT", bound=Body)
Handler = Callable[[Request], Awaitable[Any]]

_READ_STEPS_S = 1.0
_CLIENT_GONE = 499  # for the metrics; nginx calls it so


def make_app(models: Models, options: ServerOptions) -> Starlette:
    """The ASGI application. It neither loads the models nor closes them."""
    service = Service(models, options)
    get: dict[str, Handler] = {
        "/health": service.health,
        "/metrics": service.metrics_text,
        "/v1/models": service.list_models,
        "/v1/models/{name}": service.show_model,
    }
    post: dict[str, Handler] = {
        "/v1/chat/completions": service.chat,
        "/v1/completions": service.complete,
        "/v1/embeddings": service.embed,
        "/tokenize": service.tokenize,
        "/detokenize": service.detokenize,
    }
    routes = [Route(path, _answering(handler)) for path, handler in get.items()]
    routes += [Route(path, _answering(handler), methods=["POST"]) for path, handler in post.items()]
    paths = [route.path for route in routes]
    guard = Middleware(Guard, options=options, metrics=service.metrics, paths=paths)
    cors = Middleware(
        CORSMiddleware,
        allow_origins=options.cors_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
    )
    return Starlette(
        routes=routes,
        middleware=[cors, guard] if options.cors_origins else [guard],
        exception_handlers={HTTPException: _refuse, Exception: _fail},
        lifespan=service.lifespan,
    )


class Service:
    """What the routes share."""

    def __init__(self, models: Models, options: ServerOptions) -> None:
        self.models, self.options = models, options
        self.metrics = Metrics(models)
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

    async def list_models(self, request: Request) -> Response:
        data = [self._describe(name) for name in self.models.names]
        return JSONResponse({"object": "list", "data": data})

    async def show_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.models.names:
            message = f"there is no model {name[:100]!r} here"
            raise ApiError(404, message, code="model_not_found", param="model")
        return JSONResponse(self._describe(name))

    async def chat(self, request: Request) -> Any:
        body = await self._read(request, ChatBody)
        name, runtime = self.models.get(body.model, Runtime)
        config = generate.chat_config(body, self.options.max_tokens)
        deltas = generate.chat_deltas(
            runtime,
            generate.plain_messages(body.messages),
            config,
            body.tools or None,
            generate.tool_choice_of(body),
        )
        reply = ChatReply(
            name,
            runtime.tokenizer.token_bytes,
            has_logprobs=bool(body.logprobs),
            one_call=body.parallel_tool_calls is False,
        )
        return await self._reply(request, body, reply, name, [deltas])

    async def complete(self, request: Request) -> Any:
        body = await self._read(request, CompletionBody)
        name, runtime = self.models.get(body.model, Runtime)
        config = generate.completion_config(body, self.options.max_tokens)
        prompts = generate.prompts_of(body)
        streams = [generate.completion_deltas(runtime, prompt, config) for prompt in prompts]
        has_logprobs = body.logprobs is not None
        reply = CompletionReply(name, runtime.tokenizer.token_bytes, has_logprobs=has_logprobs)
        return await self._reply(request, body, reply, name, streams)

    async def embed(self, request: Request) -> Response:
        body = await self._read(request, EmbeddingBody)
        name, embedder = self.models.get(body.model, Embedder)
        if body.dimensions not in (None, embedder.dim):
            message = f"vectors of {name} have {embedder.dim} dimensions"
            raise ApiError(400, message, param="dimensions")
        texts = [body.input] if isinstance(body.input, str) else body.input
        async with self._embedding:
            work = asyncio.to_thread(embedder.embed_all, texts)
            found = await unless_gone(request.receive, work)
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
        num_tokens = sum(found.num_tokens)
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return JSONResponse({"object": "list", "data": data, "model": name, "usage": usage})

    async def tokenize(self, request: Request) -> Response:
        body = await self._read(request, TokenizeBody)
        _, runtime = self.models.get(body.model, Runtime)
        ids = await asyncio.to_thread(runtime.tokenizer.encode_prompt, body.prompt)
        limit = runtime.capabilities.context_tokens
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": limit})

    async def detokenize(self, request: Request) -> Response:
        body = await self._read(request, DetokenizeBody)
        _, runtime = self.models.get(body.model, Runtime)
        vocab_size = runtime.capabilities.vocab_size
        if beyond := [token for token in body.tokens if not 0 <= token < vocab_size]:
            message = f"token {beyond[0]} is not one of the {vocab_size} of the vocabulary"
            raise ApiError(400, message, param="tokens")
        data = b"".join(map(runtime.tokenizer.token_bytes, body.tokens))
        return JSONResponse({"prompt": data.decode("utf-8", "replace")})

    async def _reply(
        self,
        request: Request,
        body: Sampling,
        reply: Reply,
        model: str,
        streams: list[AsyncGenerator[TokenDelta, None]],
    ) -> Any:
        """The whole answer, or a stream that has its first event already: what is refused, is
        refused with a status."""
        counted = [self.metrics.observed(model, deltas) for deltas in streams]
        deltas = generate.numbered(counted)
        num_each = body.n or 1
        if not body.stream:
            work = generate.whole_answer(reply, deltas, num_each)
            return JSONResponse(await unless_gone(request.receive, work))
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        events = generate.answer_events(reply, deltas, num_each, include_usage)
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

    async def _read(self, request: Request, kind: type[BodyT]) -> BodyT:
        """The body, checked.

        Raises:
            ApiError: too large (413), too slow (408), or wrong (400).
        """
        data = await self._read_bytes(request)
        try:
            return kind.model_validate_json(data)
        except ValidationError as error:
            raise as_refusal(error) from None

    async def _read_bytes(self, request: Request) -> bytes:
        limit, seconds = self.options.max_body_bytes, self.options.client_timeout_s
        too_large = ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > limit:
            raise too_large
        data = bytearray()
        try:
            async with asyncio.timeout(seconds):
                async for part in request.stream():
                    data += part
                    if len(data) > limit:
                        raise too_large
        except TimeoutError:
            close = {"Connection": "close"}
            raise ApiError(408, "the body took too long", headers=close) from None
        return bytes(data)

    def _describe(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.models.created_s,
            "owned_by": "headrace",
        }


def _answering(handler: Handler) -> Handler:
    """The handler, whose errors are answers too."""

    async def answer(request: Request) -> Any:
        try:
            return await handler(request)
        except (ClientGoneError, ClientDisconnect):
            return Response(status_code=_CLIENT_GONE)  # which nobody reads
        except Exception as error:
            return as_problem(error).response()

    return answer


async def _next(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


async def _refuse(request: Request, error: Exception) -> Response:
    """What the router refuses."""
    assert isinstance(error, HTTPException)
    allow = dict(error.headers or {})
    message = f"{request.method} {request.url.path[:100]}: {error.detail}"
    return ApiError(error.status_code, message, headers=allow).response()


async def _fail(request: Request, error: Exception) -> Response:
    return as_problem(error).response()
