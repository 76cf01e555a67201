"""What answers look like, for the description of the API (`describe.py`).

Answers are made in `reply.py`, `responses.py` and `service.py`; a test holds every kind of them to
the schemas that these classes give. A field with a default may be left out.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """A JSON object with these keys and no others."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetails(Answer):
    """`param` is what in the request is wrong, with dots; `code` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """Why a request was refused, or failed."""

    error: ErrorDetails


class Health(Answer):
    """How the server is: only with `ok` every model answers."""

    status: Literal["ok", "loading", "failed", "closed"]


class ServedModel(Answer):
    """`created`: seconds since 1970 at which the server started."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(Answer):
    """What is served."""

    object: Literal["list"]
    data: list[ServedModel]


class Tokens(Answer):
    """Token ids of a text as a prompt; `max_model_len` is the longest sequence in tokens."""

    tokens: list[int]
    count: int
    max_model_len: int


class Text(Answer):
    """What tokens spell; special tokens are not shown."""

    prompt: str


class CachedTokens(Answer):
    """Tokens of the prompt that needed no computing."""

    cached_tokens: int


class UsageOfText(Answer):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class TokenDetails(Answer):
    """For each token the entropy of what it was drawn from, and whether it had been guessed."""

    entropy_nats: list[float]
    drafted: list[bool]


class CalledFunction(Answer):
    """`arguments`: a JSON object as text."""

    name: str
    arguments: str


class ToolCallOfAnswer(Answer):
    """A function that the model wants called."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class NumberedToolCall(ToolCallOfAnswer):
    """As `ToolCallOfAnswer`; `index` counts the calls of one answer."""

    index: int


class TokenOption(Answer):
    """A token that was likely; `bytes` are those of its text."""

    token: str
    logprob: float | None
    bytes: list[int]


class TokenLogprob(TokenOption):
    """A token of the answer, and what else was likely in its place."""

    top_logprobs: list[TokenOption]


class ChatLogprobs(Answer):
    """One entry a token, but for the one that stands for the end."""

    content: list[TokenLogprob]
    refusal: None


ChatEnd = Literal["stop", "length", "tool_calls"]
TextEnd = Literal["stop", "length"]


class ChatMessage(Answer):
    """The assistant's turn; `content` is null where there are calls alone."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallOfAnswer] = []


class ChatChoice(Answer):
    """One answer; `headrace` where the request asked for details of tokens."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatEnd
    headrace: TokenDetails | None = None


class ChatAnswer(Answer):
    """The next message of a conversation, `n` times."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageOfText


class ChatDelta(Answer):
    """What a piece adds."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[NumberedToolCall] = []


class ChatPiece(Answer):
    """A piece of one answer; `finish_reason` is null until the last."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatEnd | None
    headrace: TokenDetails | None = None


class ChatEvent(Answer):
    """A piece; with `include_usage` the last has no choices and the usage."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatPiece]
    usage: UsageOfText | None = None


class TextLogprobs(Answer):
    """One entry a token, in four lists; `text_offset` in characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None]]
    text_offset: list[int]


class TextPiece(Answer):
    """A piece of one answer; `finish_reason` is null until the last."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: TextEnd | None
    headrace: TokenDetails | None = None


class TextChoice(TextPiece):
    """A whole answer."""

    finish_reason: TextEnd


class TextAnswer(Answer):
    """What follows the prompts, `n` times each; numbered over all prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageOfText


class TextEvent(Answer):
    """A piece; with `include_usage` the last has no choices and the usage."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextPiece]
    usage: UsageOfText | None = None


class EmbeddedTokens(Answer):
    """Tokens of all texts together."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Answer):
    """A vector, as numbers or as base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsAnswer(Answer):
    """A vector for each text, in their order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddedTokens


class OutputPart(Answer):
    """A piece of text of a response."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputMessage(Answer):
    """The assistant's turn in a response."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputPart]


class ReasonedTokens(Answer):
    """Always 0: reasoning is not told apart."""

    reasoning_tokens: int


class UsageOfResponse(Answer):
    """As `UsageOfText`, in the names of responses."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasonedTokens
    total_tokens: int


class WhyIncomplete(Answer):
    """Why an answer ends before its end."""

    reason: str


class ResponseAnswer(Answer):
    """A response, as OpenAI's newer API has it. What a request cannot set is as it says here."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete"]
    error: None
    incomplete_details: WhyIncomplete | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    output: list[OutputMessage]
    parallel_tool_calls: bool
    previous_response_id: None
    store: Literal[False]
    temperature: float | None
    tool_choice: Literal["auto"]
    tools: list[Any]
    top_p: float | None
    usage: UsageOfResponse | None


class ResponseEvent(BaseModel):
    """An event of a response; what else is in it depends on `type`."""

    model_config = ConfigDict(extra="allow")
    type: str
    sequence_number: int
    response: ResponseAnswer | None = None
    item: OutputMessage | None = None
    part: OutputPart | None = None
    delta: str | None = None
    text: str | None = None


class Step(Answer):
    """A step: `rows` of slot, sequence, tokens, drafted, accepted, and 1 for a prompt."""

    id: int
    end_s: float
    ms: float
    rows: list[tuple[int, int, int, int, int, int]]


class Lanes(Answer):
    """What a model does. What follows `model` is there while it is in memory."""

    status: Literal["ok", "loading", "failed", "closed"]
    models: list[str]
    memory_bytes: int
    now_s: float
    model: str | None = None
    context_tokens: int | None = None
    slots: int | None = None
    running: int | None = None
    waiting: int | None = None
    steps: list[Step] = []


class Description(BaseModel):
    """An OpenAPI document."""

    model_config = ConfigDict(extra="allow")
    openapi: Literal["3.1.0"]
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]
