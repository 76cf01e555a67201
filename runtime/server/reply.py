"""Answers in the shape of OpenAI's API: whole, and piece by piece."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.runtime.chat.tool_calls import ToolCall
from headrace.runtime.completion import Choice, TokenDelta
from headrace.runtime.core import FinishReason, SampledToken

Json = dict[str, Any]
TokenBytes = Callable[[int], bytes]

_LOWEST_LOGPROB = -9999.0  # what OpenAI's API writes for minus infinity, which JSON lacks


@dataclass(slots=True)
class Usage:
    """Tokens of a request, counted as its answers come in."""

    completion_tokens: int = 0
    _prompts: dict[int, int] = field(default_factory=dict)
    _cached: dict[int, int] = field(default_factory=dict)

    def add(self, prompt_index: int, delta: TokenDelta) -> None:
        self._prompts[prompt_index] = delta.prompt_tokens
        # Of the answers to one prompt, those after the first find what that has computed.
        before = self._cached.get(prompt_index, delta.cached_tokens)
        self._cached[prompt_index] = min(before, delta.cached_tokens)
        self.completion_tokens += len(delta.token_ids)

    @property
    def prompt_tokens(self) -> int:
        return sum(self._prompts.values())

    @property
    def cached_tokens(self) -> int:
        """Of the prompts, those that needed no computing."""
        return sum(self._cached.values())

    def to_json(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Reply(Protocol):
    """How one request is answered. Choices are numbered over all of its prompts."""

    def head(self, streamed: bool) -> Json:
        """What the whole answer, or each event, begins with."""
        ...

    def opening(self, index: int) -> list[Json]:
        """Choices of events before the first piece of an answer."""
        ...

    def pieces(self, index: int, delta: TokenDelta) -> list[Json]:
        """Choices of the events that a delta makes; possibly none."""
        ...

    def choice(self, index: int, choice: Choice) -> Json:
        """A whole answer."""
        ...


class ChatReply:
    """Of `/v1/chat/completions`.

    Args:
        model: its name.
        token_bytes: text of a token.
        has_logprobs: whether they were asked for.
        has_details: whether entropy and drafts of tokens were asked for.
        one_call: whether calls after the first are left out (`parallel_tool_calls: false`).
    """

    def __init__(
        self,
        model: str,
        token_bytes: TokenBytes,
        *,
        has_logprobs: bool,
        has_details: bool,
        one_call: bool,
    ) -> None:
        self._begin = _Begin("chatcmpl", "chat.completion", model)
        self._token_bytes, self._has_logprobs = token_bytes, has_logprobs
        self._has_details, self._one_call = has_details, one_call
        self._num_calls: dict[int, int] = {}

    def head(self, streamed: bool) -> Json:
        return self._begin.head(".chunk" if streamed else "")

    def opening(self, index: int) -> list[Json]:
        return [self._event(index, {"role": "assistant", "content": ""})]

    def pieces(self, index: int, delta: TokenDelta) -> list[Json]:
        found: list[Json] = []
        logprobs = self._logprobs(delta)
        details = token_details(delta) if self._has_details else {}
        if delta.text or (num_shown(delta) and (logprobs or details)):
            found.append({**self._event(index, {"content": delta.text}, logprobs), **details})
        before = self._num_calls.get(index, 0)
        calls = self._kept(delta.tool_calls, before)
        if calls:
            self._num_calls[index] = before + len(calls)
            numbered = [{"index": before + i, **call} for i, call in enumerate(calls)]
            found.append(self._event(index, {"tool_calls": numbered}))
        if delta.finish_reason is not None:
            has_calls = bool(self._num_calls.get(index))
            reason = finish_reason(delta.finish_reason, has_calls)
            found.append({**self._event(index, {}), "finish_reason": reason})
        return found

    def choice(self, index: int, choice: Choice) -> Json:
        calls = self._kept(choice.tool_calls, 0)
        message: Json = {
            "role": "assistant",
            "content": None if calls and not choice.text else choice.text,
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = calls
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice),
            "finish_reason": finish_reason(choice.finish_reason, bool(calls)),
            **(token_details(choice) if self._has_details else {}),
        }

    def _kept(self, calls: Sequence[ToolCall], before: int) -> list[Json]:
        if self._one_call:
            calls = calls[: max(1 - before, 0)]
        return [_call(call) for call in calls]

    def _event(self, index: int, delta: Json, logprobs: Json | None = None) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, part: TokenDelta | Choice) -> Json | None:
        if not self._has_logprobs:
            return None
        shown = shown_tokens(part)
        return {"content": [self._logprob(token) for token in shown], "refusal": None}

    def _logprob(self, token: SampledToken) -> Json:
        return {
            **self._one(token.token_id, token.logprob),
            "top_logprobs": [self._one(other.token_id, other.logprob) for other in token.top],
        }

    def _one(self, token_id: int, logprob: float | None) -> Json:
        data = self._token_bytes(token_id)
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": finite(logprob),
            "bytes": list(data),
        }


class CompletionReply:
    """Of `/v1/completions`; the arguments are those of `ChatReply`."""

    def __init__(
        self, model: str, token_bytes: TokenBytes, *, has_logprobs: bool, has_details: bool
    ) -> None:
        self._begin = _Begin("cmpl", "text_completion", model)
        self._token_bytes, self._has_logprobs = token_bytes, has_logprobs
        self._has_details = has_details
        self._offsets: dict[int, int] = {}  # characters, by choice

    def head(self, streamed: bool) -> Json:
        return self._begin.head("")

    def opening(self, index: int) -> list[Json]:
        return []

    def pieces(self, index: int, delta: TokenDelta) -> list[Json]:
        logprobs = self._logprobs(index, delta)
        reason = None if delta.finish_reason is None else finish_reason(delta.finish_reason, False)
        details = token_details(delta) if self._has_details else {}
        has_tokens = bool(num_shown(delta) and (logprobs or details))
        if not delta.text and reason is None and not has_tokens:
            return []
        return [{**_completion(index, delta.text, logprobs, reason), **details}]

    def choice(self, index: int, choice: Choice) -> Json:
        reason = finish_reason(choice.finish_reason, False)
        details = token_details(choice) if self._has_details else {}
        return {**_completion(index, choice.text, self._logprobs(index, choice), reason), **details}

    def _logprobs(self, index: int, part: TokenDelta | Choice) -> Json | None:
        if not self._has_logprobs:
            return None
        tokens = shown_tokens(part)
        texts = [self._text(token.token_id) for token in tokens]
        offset = self._offsets.get(index, 0)
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        return {
            "tokens": texts,
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": [
                {self._text(other.token_id): finite(other.logprob) for other in token.top}
                for token in tokens
            ],
            "text_offset": offsets,
        }

    def _text(self, token_id: int) -> str:
        return self._token_bytes(token_id).decode("utf-8", "replace")


class _Begin:
    """What all events of an answer have in common."""

    def __init__(self, prefix: str, kind: str, model: str) -> None:
        self._id, self._kind, self._model = f"{prefix}-{secrets.token_hex(12)}", kind, model
        self._created_s = int(time.time())

    def head(self, suffix: str) -> Json:
        return {
            "id": self._id,
            "object": self._kind + suffix,
            "created": self._created_s,
            "model": self._model,
        }


def finish_reason(reason: FinishReason, has_calls: bool) -> str:
    """As OpenAI's API names it."""
    if has_calls and reason is FinishReason.STOP:
        return "tool_calls"
    return reason.value


def token_details(part: TokenDelta | Choice) -> Json:
    """Entropy of each token and whether it had been guessed, in the order of log probabilities."""
    shown = slice(num_shown(part))
    nats = [round(value, 4) for value in part.entropy_nats[shown]]
    return {"headrace": {"entropy_nats": nats, "drafted": list(part.drafted[shown])}}


def num_shown(part: TokenDelta | Choice) -> int:
    """How many tokens it has, but for the one that stands for the end."""
    return len(part.token_ids) - isinstance(part.matched_stop, int)


def shown_tokens(part: TokenDelta | Choice) -> Sequence[SampledToken]:
    """Tokens with log probabilities, but for the one that stands for the end."""
    return (part.logprobs or ())[: num_shown(part)]


def finite(logprob: float | None) -> float | None:
    """A number that JSON can write."""
    if logprob is None or math.isfinite(logprob):
        return logprob
    return _LOWEST_LOGPROB


def _call(call: ToolCall) -> Json:
    return {
        # Nine letters and digits: templates of Mistral's models take nothing else.
        "id": secrets.token_hex(5)[:9],
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments_json},
    }


def _completion(index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
