"""`/v1/responses`: the same answers as of a chat, in the shape of OpenAI's newer API. Text only."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from headrace.runtime.completion import TokenDelta
from headrace.runtime.core import FinishReason
from headrace.runtime.server.generate import NumberedDeltas
from headrace.runtime.server.reply import Json, Usage
from headrace.runtime.server.schema import (
    ChatBody,
    Message,
    ResponseFormat,
    ResponsesBody,
    SchemaOfAnswer,
)
from headrace.runtime.server.stream import event


def as_chat(body: ResponsesBody) -> ChatBody:
    """The same request as one for a chat."""
    given = body.input
    turns: list[tuple[str, Any]]
    turns = [("user", given)] if isinstance(given, str) else [(m.role, m.content) for m in given]
    if body.instructions is not None:
        turns.insert(0, ("system", body.instructions))
    form = body.text.format if body.text is not None else None
    wanted = None
    if form is not None:
        schema = SchemaOfAnswer(name=form.name or "answer", schema=form.schema_)
        is_schema = form.type == "json_schema"
        wanted = ResponseFormat(type=form.type, json_schema=schema if is_schema else None)
    return ChatBody.model_validate(
        {
            "model": body.model,
            "messages": [Message(role=role, content=content) for role, content in turns],
            "max_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "response_format": wanted,
            "stream": body.stream,
        }
    )


class ResponseReply:
    """One answer, whole or as events.

    Args:
        model: its name.
    """

    def __init__(self, model: str, body: ResponsesBody) -> None:
        self._model, self._body = model, body
        self._id = f"resp_{secrets.token_hex(12)}"
        self._item_id = f"msg_{secrets.token_hex(12)}"
        self._created_s = int(time.time())
        self._usage, self._text = Usage(), ""
        self._finish: FinishReason | None = None
        self._num_events = 0

    async def whole(self, deltas: NumberedDeltas) -> Json:
        """The response once it is complete."""
        async with aclosing(deltas):
            async for _, delta in deltas:
                self._take(delta)
        return self._response()

    async def events(self, deltas: NumberedDeltas) -> AsyncGenerator[bytes, None]:
        """Server-sent events, as OpenAI's clients put them together."""
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        async with aclosing(deltas):
            async for _, delta in deltas:
                if not self._num_events:  # what is refused is refused with a status
                    yield self._event("created", response=self._response())
                    yield self._event("in_progress", response=self._response())
                    yield self._event("output_item.added", output_index=0, item=self._item())
                    yield self._event("content_part.added", **place, part=_part(""))
                self._take(delta)
                if delta.text:
                    yield self._event("output_text.delta", **place, delta=delta.text, logprobs=[])
        yield self._event("output_text.done", **place, text=self._text, logprobs=[])
        yield self._event("content_part.done", **place, part=_part(self._text))
        yield self._event("output_item.done", output_index=0, item=self._item())
        yield self._event(self._status, response=self._response())

    def _take(self, delta: TokenDelta) -> None:
        self._usage.add(0, delta)
        self._text += delta.text
        self._finish = delta.finish_reason or self._finish

    @property
    def _status(self) -> str:
        if self._finish is None:
            return "in_progress"
        return "completed" if self._finish is FinishReason.STOP else "incomplete"

    def _event(self, name: str, **fields: Any) -> bytes:
        kind, number = f"response.{name}", self._num_events
        self._num_events += 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    def _item(self) -> Json:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": self._status,
            "content": [] if self._finish is None else [_part(self._text)],
        }

    def _response(self) -> Json:
        body, usage, is_done = self._body, self._usage, self._finish is not None
        is_cut = self._status == "incomplete"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_s,
            "model": self._model,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "output": [self._item()] if is_done else [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "tool_choice": "auto",
            "tools": [],
            "top_p": body.top_p,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            }
            if is_done
            else None,
        }


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
