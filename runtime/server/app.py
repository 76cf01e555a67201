"""The application: its paths, and what they have in common."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.runtime.server.describe import with_description
from headrace.runtime.server.guard import Guard
from headrace.runtime.server.idle import WhenIdle, give_back
from headrace.runtime.server.leases import Holding
from headrace.runtime.server.models import Models
from headrace.runtime.server.options import ServerOptions
from headrace.runtime.server.page import page_routes
from headrace.runtime.server.problems import ApiError, as_problem, as_refusal
from headrace.runtime.server.routes import Endpoint, Handler, endpoints
from headrace.runtime.server.schema import Body
from headrace.runtime.server.service import Service
from headrace.runtime.server.stream import ClientGoneError

BodyT = TypeVar("BodyT", bound=Body)

_IDLE_S = 2.0  # a burst of requests leaves much that is free, and that others could use
_CLIENT_GONE = 499  # for the metrics; nginx calls it so


def make_app(models: Models, options: ServerOptions) -> Starlette:
    """The ASGI application. It neither loads the models nor closes them."""
    service = Service(models, options)
    page = page_routes()
    open_paths = ["/health", *(route.path for route in page)]
    known = with_description(endpoints(service), options, open_paths)
    routes = [Route(e.path, _answering(e, options), methods=[e.method]) for e in known]
    guard = Middleware(
        Guard,
        options=options,
        metrics=service.metrics,
        paths=[route.path for route in [*routes, *page]],
        open_paths=open_paths,
    )
    idle = Middleware(WhenIdle, call=give_back, after_s=_IDLE_S)
    cors = Middleware(
        CORSMiddleware,
        allow_origins=options.cors_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
    )
    return Starlette(
        routes=[*routes, *page],
        middleware=[*([cors] if options.cors_origins else []), guard, idle, Middleware(Holding)],
        exception_handlers={HTTPException: _refuse, Exception: _fail},
        lifespan=service.lifespan,
    )


async def read_body(request: Request, kind: type[BodyT], options: ServerOptions) -> BodyT:
    """The body, checked.

    Raises:
        ApiError: too large (413), too slow (408), or wrong (400).
    """
    data = await _read_bytes(request, options.max_body_bytes, options.client_timeout_s)
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise as_refusal(error) from None


async def _read_bytes(request: Request, limit: int, seconds: float) -> bytes:
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


def _answering(endpoint: Endpoint, options: ServerOptions) -> Handler:
    """The handler, whose errors are answers too."""

    async def answer(request: Request) -> object:
        try:
            if endpoint.body is None:
                return await endpoint.handler(request)
            return await endpoint.handler(request, await read_body(request, endpoint.body, options))
        except (ClientGoneError, ClientDisconnect):
            return Response(status_code=_CLIENT_GONE)  # which nobody reads
        except Exception as error:
            return as_problem(error).response()

    return answer


async def _refuse(request: Request, error: Exception) -> Response:
    """What the router refuses."""
    assert isinstance(error, HTTPException)
    allow = dict(error.headers or {})
    message = f"{request.method} {request.url.path[:100]}: {error.detail}"
    return ApiError(error.status_code, message, headers=allow).response()


async def _fail(request: Request, error: Exception) -> Response:
    return as_problem(error).response()
