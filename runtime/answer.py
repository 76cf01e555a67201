"""A request and its answers while they are being written: what the engine keeps of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from headrace.runtime.chat.tool_calls import ToolCall
from headrace.runtime.completion import TokenDelta
from headrace.runtime.config import GenerationConfig
from headrace.runtime.core import FinishReason, SampledToken, Sequence
from headrace.runtime.sampling.sampler import Sampler


class Text(Protocol):
    """Incremental text of one answer (`runtime.text.TextStream`)."""

    @property
    def stopped(self) -> str | None:
        """The stop string that was matched."""
        ...

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that is certain now."""
        ...

    def finish(self) -> str:
        """What was still held back."""
        ...

    def take_calls(self) -> tuple[ToolCall, ...]:
        """Calls of tools found since this was last asked."""
        ...


@dataclass(slots=True, eq=False)
class Answer:
    """One of the answers to a request while it is being written; the engine thread's."""

    request: Request
    index: int
    sequence: Sequence
    sampler: Sampler
    text: Text
    has_logprobs: bool
    sampled: tuple[SampledToken, ...] = ()  # by the step in hand
    matched_stop: str | int | None = None
    new_text: str = ""
    error: Exception | None = None

    def cancelled(self) -> TokenDelta:
        """The last delta of an answer that is ended from outside, with what was held back."""
        return TokenDelta(
            self.text.finish(),
            finish_reason=FinishReason.CANCELLED,
            index=self.index,
            tool_calls=self.text.take_calls(),
        )


@dataclass(slots=True, eq=False)
class Request:
    """A checked request, ready to be added. Made by `Engine.prepare`."""

    request_id: int
    prompt_ids: tuple[int, ...]
    config: GenerationConfig
    answers: list[Answer] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepEvent:
    """Something happened to a request: text, or an error that ended the whole request."""

    request: Request
    delta: TokenDelta | None
    error: Exception | None = None
