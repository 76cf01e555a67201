"""The description of the API at `/openapi.json` (OpenAPI 3.1), made of what serves it.

Paths are those of the table in `routes.py`, bodies the classes that check them (`schema.py`),
answers those of `answers.py`. A stream is described by one of its events.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from headrace.runtime.server import answers
from headrace.runtime.server.options import ServerOptions
from headrace.runtime.server.routes import Endpoint, Parameter

PATH = "/openapi.json"

Json = dict[str, Any]
Schemas = dict[type[BaseModel], Json]

_REFERENCE = "#/components/schemas/{model}"
_JSON, _EVENTS = "application/json", "text/event-stream"
_GUARDED = (400, 403, 500)  # the guard's, and what is our fault
_ABOUT = {
    400: "the request is wrong; `param` says where",
    401: "the API key is missing or wrong",
    403: "the host or the page was not named when the server was started",
    404: "there is no such model",
    408: "the body took too long",
    413: "the body is larger than {max_body_bytes} bytes",
    429: "too many requests are under way; Retry-After says when to try again",
    500: "the server failed; its log says why",
    503: "the model is being loaded, failed or cannot be had, or the server is shutting down",
}
_WAITING = (429, 503)


def with_description(
    endpoints: Sequence[Endpoint], options: ServerOptions, open_paths: Collection[str]
) -> list[Endpoint]:
    """The endpoints, and one more that describes all of them. The arguments are `describe`'s."""

    async def answer(request: Request) -> Response:
        return Response(data, media_type=_JSON)

    about = "This description"
    known = [*endpoints, Endpoint("GET", PATH, about, answer, answers.Description)]
    data = json.dumps(describe(known, options, open_paths)).encode()
    return known


def describe(
    endpoints: Sequence[Endpoint], options: ServerOptions, open_paths: Collection[str]
) -> Json:
    """The description.

    Args:
        endpoints: all of them, but for the page.
        open_paths: those that need no key.
    """
    schemas, components = _schemas(endpoints)
    schema = schemas[answers.ErrorAnswer]
    statuses = _ABOUT.keys() - ({401} if options.api_key is None else set())
    errors = {str(status): _error(status, schema, options) for status in sorted(statuses)}
    paths: Json = {}
    for endpoint in endpoints:
        needs_key = options.api_key is not None and endpoint.path not in open_paths
        operation = _operation(endpoint, schemas, needs_key)
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = operation
    about = "A server of language models that speaks OpenAI's API."
    found: Json = {
        "openapi": "3.1.0",
        "info": {"title": "headrace", "version": version("headrace"), "description": about},
        "paths": paths,
        "components": {"schemas": components, "responses": errors},
    }
    if options.api_key is not None:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return found


class _Untitled(GenerateJsonSchema):
    """Without titles that say a field's name once more."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _schemas(endpoints: Sequence[Endpoint]) -> tuple[Schemas, Json]:
    """A reference to the schema of each class, and what they refer to."""
    kinds: list[type[BaseModel]] = [answers.ErrorAnswer]
    for endpoint in endpoints:
        known = (endpoint.body, endpoint.answer, endpoint.events)
        kinds += [kind for kind in known if kind is not None and kind not in kinds]
    references, shared = models_json_schema(
        [(kind, "validation") for kind in kinds],
        ref_template=_REFERENCE,
        schema_generator=_Untitled,
    )
    return {kind: references[kind, "validation"] for kind in kinds}, shared["$defs"]


def _operation(endpoint: Endpoint, schemas: Schemas, needs_key: bool) -> Json:
    statuses = {*endpoint.errors, *_GUARDED, *([401] if needs_key else [])}
    responses = {"200": _answer(endpoint, schemas)}
    for status in sorted(statuses):
        responses[str(status)] = {"$ref": f"#/components/responses/{status}"}
    if endpoint.path == "/health":  # says the same, whatever it says
        responses["503"] = {**responses["200"], "description": "not every model answers"}
    found: Json = {
        "operationId": _identifier(endpoint),
        "summary": endpoint.about,
        "responses": responses,
    }
    if endpoint.parameters:
        found["parameters"] = [_parameter(parameter) for parameter in endpoint.parameters]
    if endpoint.body is not None:
        content = {_JSON: {"schema": schemas[endpoint.body]}}
        found["requestBody"] = {"required": True, "content": content}
    if needs_key:
        found["security"] = [{"key": []}]
    return found


def _answer(endpoint: Endpoint, schemas: Schemas) -> Json:
    whole: Json = {"type": "string"} if endpoint.answer is None else schemas[endpoint.answer]
    content: Json = {endpoint.media_type: {"schema": whole}}
    if endpoint.events is not None:
        content[_EVENTS] = {"schema": _event(schemas[endpoint.events], schemas)}
    return {"description": endpoint.about, "content": content}


def _event(data: Json, schemas: Schemas) -> Json:
    """One of a stream, as OpenAPI 3.2 looks at them: data is a text that holds JSON, or the end."""
    known = {"anyOf": [data, schemas[answers.ErrorAnswer]]}
    text = {
        "type": "string",
        "anyOf": [{"contentMediaType": _JSON, "contentSchema": known}, {"const": "[DONE]"}],
    }
    return {
        "type": "object",
        "description": "With `stream`: one of the events, which come as they are made.",
        "properties": {"event": {"type": "string"}, "data": text},
        "required": ["data"],
        "additionalProperties": False,
    }


def _error(status: int, schema: Json, options: ServerOptions) -> Json:
    about = _ABOUT[status].format(max_body_bytes=options.max_body_bytes)
    found: Json = {
        "description": f"{HTTPStatus(status).phrase}: {about}",
        "content": {_JSON: {"schema": schema}},
    }
    if status in _WAITING:
        found["headers"] = {
            "Retry-After": {"description": "seconds", "schema": {"type": "string"}},
        }
    return found


def _parameter(parameter: Parameter) -> Json:
    schema: Json = {"type": "string"}
    if parameter.pattern is not None:
        schema["pattern"] = parameter.pattern
    return {
        "name": parameter.name,
        "in": "path" if parameter.in_path else "query",
        "required": parameter.in_path,
        "description": parameter.about,
        "schema": schema,
    }


def _identifier(endpoint: Endpoint) -> str:
    """A name for programs: `post_v1_chat_completions`."""
    words = endpoint.path.replace("{", "").replace("}", "").replace(".", "/").split("/")
    return "_".join([endpoint.method.lower(), *filter(None, words)])
