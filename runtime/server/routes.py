"""Every path of the API, what it takes, and what does it: one table for serving and describing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from headrace.runtime.server.schema import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    ResponsesBody,
    TokenizeBody,
)
from headrace.runtime.server.service import Service

Handler = Callable[..., Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A method of a path.

    Attributes:
        handler: called with the request and, where there is one, the checked body.
        body: what the request must hold.
    """

    method: str
    path: str
    handler: Handler
    body: type[Body] | None = None


def endpoints(service: Service) -> list[Endpoint]:
    """All of them, but for the page."""
    return [
        Endpoint("GET", "/health", service.health),
        Endpoint("GET", "/lanes", service.lanes),
        Endpoint("GET", "/metrics", service.metrics_text),
        Endpoint("GET", "/v1/models", service.list_models),
        Endpoint("GET", "/v1/models/{name}", service.show_model),
        Endpoint("POST", "/v1/chat/completions", service.chat, ChatBody),
        Endpoint("POST", "/v1/completions", service.complete, CompletionBody),
        Endpoint("POST", "/v1/responses", service.respond, ResponsesBody),
        Endpoint("POST", "/v1/embeddings", service.embed, EmbeddingBody),
        Endpoint("POST", "/tokenize", service.tokenize, TokenizeBody),
        Endpoint("POST", "/detokenize", service.detokenize, DetokenizeBody),
    ]
