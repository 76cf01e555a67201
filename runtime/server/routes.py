"""Every path of the API, what it takes, and what does it: one table for serving and describing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from headrace.runtime.server import answers, schema
from headrace.runtime.server.service import Service

Handler = Callable[..., Awaitable[Any]]

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A string in a path or, unless it may be left out, in a query.

    Attributes:
        pattern: what it must match.
    """

    name: str
    about: str
    in_path: bool = False
    pattern: str | None = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A method of a path.

    Attributes:
        about: what it does, in a few words.
        handler: called with the request and, where there is one, the checked body.
        answer: what it gives, as JSON; None for anything else.
        body: what the request must hold.
        events: what it gives piece by piece where the body asks for a stream.
        media_type: of the answer.
        errors: statuses of refusals besides those of the guard.
    """

    method: str
    path: str
    about: str
    handler: Handler
    answer: type[BaseModel] | None
    body: type[schema.Body] | None = None
    events: type[BaseModel] | None = None
    parameters: tuple[Parameter, ...] = ()
    media_type: str = "application/json"
    errors: tuple[int, ...] = ()


# What may happen to every body, and to whoever needs a model.
_ASKING = (400, 404, 408, 413, 429, 503)


def endpoints(service: Service) -> list[Endpoint]:
    """All of them, but for the page and the description of these."""
    return [
        Endpoint("GET", "/health", "How the server is", service.health, answers.Health),
        Endpoint(
            "GET",
            "/lanes",
            "The newest steps of a model, and who shared them",
            service.lanes,
            answers.Lanes,
            parameters=(
                Parameter("model", "Which; the first that writes text unless given."),
                Parameter("after", "A step's id; only later ones are told.", pattern="^-?[0-9]+$"),
            ),
            errors=(400, 404, 429, 503),
        ),
        Endpoint(
            "GET",
            "/metrics",
            "Figures for Prometheus",
            service.metrics_text,
            None,
            media_type=METRICS_TYPE,
        ),
        Endpoint("GET", "/v1/models", "What is served", service.list_models, answers.ModelList),
        Endpoint(
            "GET",
            "/v1/models/{name}",
            "One of them",
            service.show_model,
            answers.ServedModel,
            parameters=(Parameter("name", "As requests call it.", in_path=True),),
            errors=(404,),
        ),
        _asking(
            "/v1/chat/completions",
            "A conversation's next message",
            service.chat,
            answers.ChatAnswer,
            schema.ChatBody,
            answers.ChatEvent,
        ),
        _asking(
            "/v1/completions",
            "What follows raw prompts",
            service.complete,
            answers.TextAnswer,
            schema.CompletionBody,
            answers.TextEvent,
        ),
        _asking(
            "/v1/responses",
            "A conversation's next message, in OpenAI's newer shape",
            service.respond,
            answers.ResponseAnswer,
            schema.ResponsesBody,
            answers.ResponseEvent,
        ),
        _asking(
            "/v1/embeddings",
            "Vectors of texts",
            service.embed,
            answers.EmbeddingsAnswer,
            schema.EmbeddingBody,
        ),
        _asking(
            "/tokenize",
            "Token ids of a text",
            service.tokenize,
            answers.Tokens,
            schema.TokenizeBody,
        ),
        _asking(
            "/detokenize",
            "The text of token ids",
            service.detokenize,
            answers.Text,
            schema.DetokenizeBody,
        ),
    ]


def _asking(
    path: str,
    about: str,
    handler: Handler,
    answer: type[BaseModel],
    body: type[schema.Body],
    events: type[BaseModel] | None = None,
) -> Endpoint:
    return Endpoint("POST", path, about, handler, answer, body, events, errors=_ASKING)
