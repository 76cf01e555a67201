"""What comes out of a request: pieces while it runs, the whole at its end."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.runtime.chat.tool_calls import ToolCall
from headrace.runtime.core import FinishReason, SampledToken


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What one step added to one answer.

    Attributes:
        text: new text; empty while a character or a possible stop string is incomplete.
        token_ids: new tokens. A stop token is among them, but not in the text.
        logprobs: one entry a token with its alternatives; None unless the request asked for them.
        entropy_nats: of the model's distribution that each token was drawn from.
        finish_reason: set on the last delta of an answer.
        matched_stop: the stop string or the id of the stop token that ended the answer.
        index: which of the request's `n` answers.
        tool_calls: calls of tools that became whole; their text is not in `text`.
        prompt_tokens: of the request.
        cached_tokens: of them, how many needed no computing.
        num_accepted: how many of the tokens, from the first on, had been guessed (drafts).
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[SampledToken, ...] | None = None
    entropy_nats: tuple[float, ...] = ()
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    index: int = 0
    tool_calls: tuple[ToolCall, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_accepted: int = 0

    @property
    def drafted(self) -> tuple[bool, ...]:
        """For each token, whether it had been guessed."""
        return tuple([i < self.num_accepted for i in range(len(self.token_ids))])


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to a prompt; the fields are those of `TokenDelta`, put together."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched_stop: str | int | None
    logprobs: tuple[SampledToken, ...] | None
    entropy_nats: tuple[float, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    drafted: tuple[bool, ...] = field(default=(), compare=False)  # how it came, not what it is


@dataclass(frozen=True, slots=True)
class Completion:
    """All answers to a prompt: `choices` has one for each of `n`.

    What belongs to an answer can be read from the completion directly where there is one choice
    or the first is meant: `completion.text` is `completion.choices[0].text`.
    """

    prompt_tokens: int
    choices: tuple[Choice, ...]

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def matched_stop(self) -> str | int | None:
        return self.choices[0].matched_stop

    @property
    def logprobs(self) -> tuple[SampledToken, ...] | None:
        return self.choices[0].logprobs

    @property
    def entropy_nats(self) -> tuple[float, ...]:
        return self.choices[0].entropy_nats

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.choices[0].tool_calls

    @property
    def completion_tokens(self) -> int:
        """Generated tokens of all choices, stop tokens included."""
        return sum(len(choice.token_ids) for choice in self.choices)


@dataclass(slots=True)
class ChoiceBuilder:
    """Collects the deltas of one answer."""

    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[SampledToken] | None = None
    entropy_nats: list[float] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)

    def add(self, delta: TokenDelta) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.entropy_nats += delta.entropy_nats
        self.tool_calls += delta.tool_calls
        self.drafted += delta.drafted
        if delta.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *delta.logprobs]

    def build(self, last: TokenDelta) -> Choice:
        """The answer, once its last delta was added."""
        assert last.finish_reason is not None
        return Choice(
            self.index,
            "".join(self.texts),
            tuple(self.token_ids),
            last.finish_reason,
            last.matched_stop,
            None if self.logprobs is None else tuple(self.logprobs),
            tuple(self.entropy_nats),
            tuple(self.tool_calls),
            tuple(self.drafted),
        )
