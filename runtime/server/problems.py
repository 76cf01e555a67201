"""Errors as OpenAI's clients expect them: a status and `{"error": {message, type, param, code}}`.

400 what the caller can mend, 429 and 503 with Retry-After what time mends, 500 our own fault.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from headrace.runtime.errors import (
    ConfigError,
    EngineClosedError,
    InsufficientMemoryError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
)

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
_MAX_MESSAGE = 1000  # characters; a message may quote what was sent

# Fields of `GenerationConfig` that requests call something else.
_PARAMS = {
    "max_new_tokens": "max_tokens",
    "logprobs": "top_logprobs",
    "grammar": "response_format",
}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class ApiError(RequestError):
    """A request that is answered with an error.

    Args:
        status: of the response.
        message: one line for the caller.
        code: for programs, as OpenAI's API has them.
        param: what in the request is wrong, with dots: `messages.0.content`.
        headers: of the response, besides its own.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.headers = dict(headers or {})
        if status in (429, 503):
            self.headers.setdefault("Retry-After", str(RETRY_AFTER_S))

    def body(self) -> dict[str, Any]:
        message = str(self)
        if len(message) > _MAX_MESSAGE:
            message = f"{message[:_MAX_MESSAGE]}..."
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def as_problem(error: Exception) -> ApiError:
    """What to tell the caller about an error of a request; logs those that are our fault."""
    if isinstance(error, ApiError):
        return error
    message = " ".join(str(error).split())
    if isinstance(error, QueueFullError):
        return ApiError(429, message, code="rate_limit_exceeded")
    if isinstance(error, PromptTooLongError):
        return ApiError(400, message, code="context_length_exceeded", param="messages")
    if isinstance(error, InsufficientMemoryError):
        return ApiError(400, message, code="context_length_exceeded", param="max_tokens")
    if isinstance(error, ConfigError):
        param = _PARAMS.get(error.field, error.field)
        message = f"{param}={error.value!r} is not valid: expected {error.expected}"
        return ApiError(400, message, param=param)
    if isinstance(error, RequestError):
        return ApiError(400, message)
    if isinstance(error, EngineClosedError):
        return ApiError(503, message, code="model_unavailable")
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed; its log says why", code="internal_error")


def as_refusal(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a body."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    # Of the forms that a value may have, the one of its own type says more.
    first = min(found, key=lambda item: item["type"].endswith("_type"))
    # Names of the members of a union are of no use to a caller; positions and keys are.
    place = [str(part) for part in first["loc"] if _is_place(part)]
    param = ".".join(place) or None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unrecognized request argument: {param}", param=param)
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['msg']}")
    prefix = f"{param}: " if param else "the body: "
    return ApiError(400, f"{prefix}{first['msg']}", param=param)


def _is_place(part: int | str) -> bool:
    return isinstance(part, int) or (part.isidentifier() and part not in ("str", "int", "float"))
