"""What callers may give as prompts."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from headrace.runtime.errors import RequestError

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


def split_prompts(prompts: Any) -> tuple[bool, list[Any]]:
    """Whether this is one prompt (a text or token ids), and the prompts."""
    if isinstance(prompts, (str, bytes, bytearray, Mapping)) or not isinstance(prompts, Iterable):
        return True, [prompts]
    items = list(prompts)
    return (True, [items]) if items and _is_token_id(items[0]) else (False, items)


def is_conversation(prompt: Any) -> TypeGuard[Messages]:
    """Whether this is a list of messages."""
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)


def as_token_ids(prompt: Any) -> list[int]:
    """A prompt that is no text.

    Raises:
        RequestError: it is no list of whole numbers either.
    """
    try:
        if isinstance(prompt, (bytes, bytearray, Mapping)):
            raise TypeError
        return [operator.index(i) for i in prompt]
    except TypeError:
        raise RequestError(
            f"a prompt is a text or a list of token ids, not {type(prompt).__name__}"
        ) from None


def _is_token_id(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True
