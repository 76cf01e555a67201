"""A request for text: from its body to the answers of a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from headrace.runtime.api import Runtime
from headrace.runtime.completion import ChoiceBuilder, TokenDelta
from headrace.runtime.errors import PromptTooLongError
from headrace.runtime.grammar.spec import Grammar
from headrace.runtime.server.problems import ApiError
from headrace.runtime.server.reply import Reply, Usage
from headrace.runtime.server.schema import (
    MAX_CHOICES,
    ChatBody,
    CompletionBody,
    Message,
    NamedTool,
    ResponseFormat,
    Sampling,
)
from headrace.runtime.server.stream import event

Deltas = AsyncGenerator[TokenDelta, None]
NumberedDeltas = AsyncGenerator[tuple[int, TokenDelta], None]

DONE = b"data: [DONE]\n\n"

_SAME_NAMES = (
    "temperature",
    "top_p",
    "n",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
)


async def chat_deltas(
    runtime: Runtime,
    messages: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str,
) -> Deltas:
    """Pieces of the answers to a conversation; refused at the first step where the queue is full.

    Raises:
        as `Runtime.achat`.
    """
    deltas = await runtime.achat(
        messages, stream=True, tools=tools, tool_choice=tool_choice, **config
    )
    async with aclosing(deltas):
        async for delta in deltas:
            yield delta


async def completion_deltas(
    runtime: Runtime, prompt: str | list[int], config: Mapping[str, Any]
) -> Deltas:
    """Pieces of the answers to a raw prompt.

    Raises:
        as `Runtime.astream`; a prompt that is too long is named as what it is.
    """
    try:
        async with aclosing(runtime.astream(prompt, **config)) as deltas:
            async for delta in deltas:
                yield delta
    except PromptTooLongError as error:
        code = "context_length_exceeded"
        raise ApiError(400, str(error), code=code, param="prompt") from None


async def numbered(streams: Sequence[Deltas]) -> NumberedDeltas:
    """Deltas of several prompts with the prompt's index, as they come. All end with the first that
    fails, or when this is closed."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for delta in only:
                yield 0, delta
        return
    arrived: asyncio.Queue[tuple[int, TokenDelta] | None] = asyncio.Queue()

    async def forward(index: int, deltas: Deltas) -> None:
        async with aclosing(deltas):
            async for delta in deltas:
                arrived.put_nowait((index, delta))

    async def forward_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for index, deltas in enumerate(streams):
                    group.create_task(forward(index, deltas))
        finally:
            arrived.put_nowait(None)

    task = asyncio.create_task(forward_all())
    try:
        while (item := await arrived.get()) is not None:
            yield item
        await task
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def whole_answer(reply: Reply, deltas: NumberedDeltas, num_each: int) -> dict[str, Any]:
    """All choices and the usage.

    Args:
        num_each: answers to each prompt.
    """
    usage = Usage()
    builders: dict[int, ChoiceBuilder] = {}
    choices: dict[int, dict[str, Any]] = {}
    async with aclosing(deltas):
        async for prompt_index, delta in deltas:
            usage.add(prompt_index, delta)
            index = prompt_index * num_each + delta.index
            builder = builders.setdefault(index, ChoiceBuilder(index))
            builder.add(delta)
            if delta.finish_reason is not None:
                choices[index] = reply.choice(index, builder.build(delta))
    ordered = [choices[index] for index in sorted(choices)]
    return {**reply.head(False), "choices": ordered, "usage": usage.to_json()}


async def answer_events(
    reply: Reply, deltas: NumberedDeltas, num_each: int, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Server-sent events of the answers; the arguments are those of `whole_answer`."""
    usage = Usage()
    seen: set[int] = set()
    head = reply.head(True)
    rest = {"usage": None} if include_usage else {}
    async with aclosing(deltas):
        async for prompt_index, delta in deltas:
            usage.add(prompt_index, delta)
            index = prompt_index * num_each + delta.index
            found = [] if index in seen else reply.opening(index)
            seen.add(index)
            for choice in found + reply.pieces(index, delta):
                yield event({**head, "choices": [choice], **rest})
    if include_usage:
        yield event({**head, "choices": [], "usage": usage.to_json()})
    yield DONE


def chat_config(body: ChatBody, limit: int | None) -> dict[str, Any]:
    """Fields of `GenerationConfig` that a request sets.

    Args:
        limit: most tokens that the server grants.

    Raises:
        ApiError, ConfigError: they contradict each other.
    """
    config = _config(body, body.max_completion_tokens or body.max_tokens, limit)
    if body.max_completion_tokens == 0:
        config["max_new_tokens"] = 0  # which is refused, like 0 in max_tokens
    if body.logprobs:
        config["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    if (grammar := answer_grammar(body.response_format)) is not None:
        config["grammar"] = grammar
    return config


def completion_config(body: CompletionBody, limit: int | None) -> dict[str, Any]:
    """As `chat_config`."""
    config = _config(body, body.max_tokens, limit)
    if body.logprobs is not None:
        config["logprobs"] = body.logprobs
    return config


def prompts_of(body: CompletionBody) -> list[str | list[int]]:
    """The prompts of a request.

    Raises:
        ApiError: there are more answers to give than a request may ask for.
    """
    given = body.prompt
    many = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
    prompts: list[Any] = list(given) if many else [given]
    if len(prompts) * (body.n or 1) > MAX_CHOICES:
        message = f"n times the number of prompts may be {MAX_CHOICES} at most"
        raise ApiError(400, message, param="n")
    return prompts


def _config(body: Sampling, wanted: int | None, limit: int | None) -> dict[str, Any]:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream=true", param="stream_options")
    config = {n: value for n in _SAME_NAMES if (value := getattr(body, n)) is not None}
    if wanted is None:
        wanted = limit
    if wanted is not None:
        config["max_new_tokens"] = wanted if limit is None else min(wanted, limit)
    if body.top_k is not None:
        config["top_k"] = 0 if body.top_k == -1 else body.top_k
    if body.seed is not None:
        config["seed"] = body.seed % 2**64
    if body.logit_bias is not None:
        config["logit_bias"] = {_token_id(key): bias for key, bias in body.logit_bias.items()}
    return config


def _token_id(key: str) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > 9:
        raise ApiError(400, f"logit_bias has {key[:20]!r} for a token id", param="logit_bias")
    return int(key)


def answer_grammar(form: ResponseFormat | None) -> Grammar | None:
    """What `response_format` asks for; None for any text."""
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Grammar.json_schema({"type": "object"})
    if form.json_schema is None or form.json_schema.schema_ is None:
        message = "response_format has no json_schema.schema"
        raise ApiError(400, message, param="response_format.json_schema.schema")
    return Grammar.json_schema(form.json_schema.schema_)


def tool_choice_of(body: ChatBody) -> str:
    """As `Runtime.chat` takes it."""
    if isinstance(body.tool_choice, NamedTool):
        return body.tool_choice.function.name
    return body.tool_choice or "auto"


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates know them: text as one string, arguments as objects.

    Raises:
        ApiError: a part is no text, or arguments are no JSON object.
    """
    return [_plain(message, f"messages.{i}") for i, message in enumerate(messages)]


def _plain(message: Message, place: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if isinstance(content, list):
        for i, part in enumerate(content):
            if part.text is None:
                problem = f"a part of type {part.type[:40]!r} cannot be read, only text"
                raise ApiError(400, problem, param=f"{place}.content.{i}")
        content = "\n".join(part.text for part in content if part.text is not None)
    plain: dict[str, Any] = {"role": role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(
                        call.function.arguments, f"{place}.tool_calls.{i}.function.arguments"
                    ),
                },
            }
            for i, call in enumerate(message.tool_calls)
        ]
    return plain


def _arguments(text: str, place: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ApiError(400, "arguments of a call are a JSON object as text", param=place)
    return value
