"""A request and its answers while they are being written: what the engine keeps of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from headrace.backends.base import StepOutput
from headrace.runtime.chat.tool_calls import ToolCall
from headrace.runtime.completion import TokenDelta
from headrace.runtime.config import GenerationConfig
from headrace.runtime.core import (
    FinishReason,
    Row,
    RowResult,
    SampledToken,
    Sequence,
    TokenAlternative,
)
from headrace.runtime.sampling.likely import Wanted, draw_likely
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
    num_accepted: int = 0  # of them, from the first on: those that were drafts
    matched_stop: str | int | None = None
    new_text: str = ""
    error: Exception | None = None

    def take(self, row: Row, output: StepOutput, line: int, drawn: Mapping[int, int]) -> RowResult:
        """`draw` a row of a plan, if it has logits; what goes wrong in it ends the answer."""
        finish: FinishReason | None = None
        self.sampled = ()
        if row.num_logits:
            try:
                finish = self.draw(row, output, line, drawn)
            except Exception as error:  # a request fails alone, whatever it was
                self.error, finish = error, FinishReason.ERROR
        result = RowResult(row.seq_id, self.sampled, finish)
        self.num_accepted = result.num_accepted(row.drafts)
        return result

    def draw(
        self, row: Row, output: StepOutput, line: int, drawn: Mapping[int, int]
    ) -> FinishReason | None:
        """Draw and accept tokens as long as they are what was drafted; STOP where one ends the
        answer. A stop string is found later, by `read`.

        Args:
            line: of the output, where the row's logits begin.
            drawn: tokens by line that are known already (`drawn_together`).

        Raises:
            whatever the sampler raises; `sampled` has what was accepted before.
        """
        sampler, sequence, drafts = self.sampler, self.sequence, row.drafts
        sampled = list[SampledToken]()
        generated_len = sequence.generated_len
        for i in range(row.num_logits):
            draft = drafts[i] if i < len(drafts) else None
            known = drawn.get(line + i)
            token_id, logprob, top = (
                self._sample(i, output, line + i, draft) if known is None else (known, None, ())
            )
            sampler.accept(token_id)
            entropy_nats = float(output.entropy_nats[line + i])
            sampled.append(SampledToken(token_id, entropy_nats, logprob, top))
            self.sampled = tuple(sampled)
            if sampler.is_stop_token(token_id, generated_len + i + 1):
                self.matched_stop = token_id
                return FinishReason.STOP
            if sampler.is_complete:
                return FinishReason.STOP
            if token_id != draft:
                break
        sequence.forced = sampler.forced
        return None

    def _sample(
        self, index: int, output: StepOutput, line: int, draft: int | None
    ) -> tuple[int, float | None, tuple[TokenAlternative, ...]]:
        """Draw the token behind `index` others of this step."""
        given = None if output.probabilities is None else output.probabilities.rows(line)
        position = len(self.sequence.tokens) + index
        return self.sampler.sample(output.logits[line], position, given, draft)

    def read(self) -> bool:
        """Make text of what was drawn; True where a stop string ends the answer. What was drawn
        behind that is dropped."""
        self.new_text = ""
        text_len = len(self.sampled) - (self.matched_stop is not None)  # a stop token is no text
        for i in range(text_len):
            self.new_text += self.text.push((self.sampled[i].token_id,))
            if self.text.stopped is not None:
                self.matched_stop = self.text.stopped
                self.sampled = self.sampled[: i + 1]
                self.num_accepted = min(self.num_accepted, i + 1)
                return True
        return False

    def delta(self) -> TokenDelta:
        """What the step in hand adds, once it was read; with what was held back if it is the last
        one."""
        sampled, sequence, text = self.sampled, self.sequence, self.new_text
        finish = sequence.finish_reason
        if finish is not None:
            text += self.text.finish()
        return TokenDelta(
            text,
            tuple([token.token_id for token in sampled]),
            sampled if self.has_logprobs else None,
            tuple([token.entropy_nats for token in sampled]),
            finish,
            self.matched_stop,
            self.index,
            self.text.take_calls(),
            len(self.request.prompt_ids),
            sequence.found_len,
            self.num_accepted,
        )

    def guess(self, position: int, output: StepOutput, line: int) -> int:
        """A draft for a position, from the output of a draft model."""
        given = None if output.probabilities is None else output.probabilities.rows(line)
        return self.sampler.guess(output.logits[line], position, given)

    def cancelled(self) -> TokenDelta:
        """The last delta of an answer that is ended from outside, with what was held back."""
        return TokenDelta(
            self.text.finish(),
            finish_reason=FinishReason.CANCELLED,
            index=self.index,
            tool_calls=self.text.take_calls(),
            prompt_tokens=len(self.request.prompt_ids),
            cached_tokens=self.sequence.found_len,
        )


def drawn_together(
    rows: Iterable[Row], answers: Iterable[Answer | None], output: StepOutput
) -> dict[int, int]:
    """Tokens by line of the output, as far as they are found for all rows at once. Behind a draft
    that turns out wrong they mean nothing.

    Args:
        answers: of the rows; None where nobody waits for it any more.
    """
    if output.probabilities is None:
        return {}
    wanted, line = list[Wanted](), 0
    for row, answer in zip(rows, answers, strict=True):
        if answer is not None and answer.sampler.draws_likely:
            sampler, position = answer.sampler, len(answer.sequence.tokens)
            wanted += [Wanted(sampler, line + i, position + i) for i in range(row.num_logits)]
        line += row.num_logits
    return draw_likely(wanted, output.logits, output.probabilities) if wanted else {}


@dataclass(slots=True, eq=False)
class Request:
    """A checked request, ready to be added. Made by `Engine.prepare`."""

    request_id: int
    prompt_ids: tuple[int, ...]
    config: GenerationConfig
    answers: list[Answer] = field(default_factory=list)


class StepEvent(NamedTuple):
    """Something happened to a request: text, or an error that ended the whole request."""

    request: Request
    delta: TokenDelta | None
    error: Exception | None = None
