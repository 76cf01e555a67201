"""What requests may say. Unknown keys are refused; those of OpenAI's API that change nothing here
(`user`, `metadata` and their like) are accepted.

Ranges are those of `GenerationConfig`, checked where it is made and only told here (`_told`), for
the description of the API; a test holds the two together. Limits on counts are here: they bound
what a request costs before it is queued.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.config import JsonDict

from headrace.runtime.chat.template import ROLE
from headrace.runtime.config import MAX_LOGPROBS

MAX_CHOICES = 128  # answers to one request


def _told(**keywords: Any) -> Any:
    """Keywords of JSON Schema for what is checked elsewhere."""
    return Field(json_schema_extra=keywords)


def _no_number(value: Any) -> Any:
    """0 equals False, but is none: nothing that could be taken for one."""
    return value if isinstance(value, bool) else None


_Stop = Annotated[str, Field(max_length=128), _told(minLength=1)]
_Share = Annotated[float, _told(minimum=0, maximum=1)]
_Penalty = Annotated[float, _told(minimum=-2, maximum=2)]
_AboveZero = Annotated[float, _told(exclusiveMinimum=0)]
_FromZero = Annotated[float, _told(minimum=0)]
_Tokens = Annotated[int, _told(minimum=1)]
_TokenId = Annotated[int, _told(minimum=0)]
_Alternatives = Annotated[int, _told(minimum=0, maximum=MAX_LOGPROBS)]
_Biases = Annotated[
    dict[str, float], Field(max_length=1024), _told(propertyNames={"pattern": "^[0-9]{1,9}$"})
]
_Text = Annotated[str, _told(minLength=1)]
_Ids = Annotated[list[_TokenId], _told(minItems=1)]


class Body(BaseModel):
    """A JSON object whose types are what they say: no numbers in strings."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    """`include_usage`: one more event before the end, with no choices and the usage."""

    include_usage: bool = False
    include_obfuscation: bool = False  # accepted; nothing is padded here


class Extension(Body):
    """What OpenAI's API has no place for. `token_details`: entropy of each token, and whether it
    had been guessed, as `headrace` beside `logprobs` of an answer."""

    token_details: bool = False


class Asked(Body):
    """What a request says besides its question. `model` may be left out where there is one."""

    model: str | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None


def _tell_alias(schema: JsonDict) -> None:
    """The other name of a key, which the description of a model leaves out."""
    properties = schema["properties"]
    assert isinstance(properties, dict)
    properties["repeat_penalty"] = properties["repetition_penalty"]
    schema["not"] = {"required": ["repeat_penalty", "repetition_penalty"]}


class Sampling(Asked):
    """How answers are decoded; None is the model's own default."""

    model_config = ConfigDict(json_schema_extra=_tell_alias)

    max_tokens: _Tokens | None = None
    temperature: _FromZero | None = None
    top_p: _Share | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: _Biases | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    # Not OpenAI's.
    headrace: Extension = Extension()
    # What other local servers take.
    top_k: Annotated[int, _told(minimum=-1)] | None = None
    min_p: _Share | None = None
    repetition_penalty: _AboveZero | None = Field(
        None, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")
    )
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=256)] | None = None
    ignore_eos: bool | None = None


class ContentPart(BaseModel):
    """A piece of a message. Only text can be read."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: str
    text: str | None = None


class FunctionCall(Body):
    """`arguments`: a JSON object as text, as it was given."""

    name: str
    arguments: str


class ToolCallMessage(Body):
    """A call that an assistant made earlier."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Body):
    """One turn of a conversation."""

    role: Annotated[str, _told(pattern=f"^{ROLE.pattern}$")]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallMessage] | None = None
    tool_call_id: str | None = None
    # What answers carry and clients send back.
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    parsed: Any = None


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    """The function that must be called."""

    type: Literal["function"]
    function: NamedFunction


class SchemaOfAnswer(Body):
    """`schema` is a JSON schema; `strict` is always meant."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaOfAnswer | None = None


class ChatBody(Sampling):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: _Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: _Alternatives | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    # Accepted, since they ask for nothing else than what is done.
    store: bool | None = None
    modalities: list[Literal["text"]] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None


class CompletionBody(Sampling):
    """`POST /v1/completions`. `logprobs` is how many alternatives to report."""

    prompt: (
        _Text
        | _Ids
        | Annotated[list[_Text], Field(min_length=1, max_length=MAX_CHOICES)]
        | Annotated[list[_Ids], Field(min_length=1, max_length=MAX_CHOICES)]
    )
    logprobs: _Alternatives | None = None
    echo: Annotated[Literal[False], BeforeValidator(_no_number)] | None = None
    best_of: int | None = Field(None, ge=1, le=1)
    suffix: None = None


class InputMessage(Body):
    """A turn of a conversation, or an item of an earlier response that is sent back."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ContentPart]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class TextFormat(Body):
    """As `ResponseFormat`, in one piece."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesBody(Asked):
    """`POST /v1/responses`. Responses are not stored: each request carries its conversation."""

    input: str | Annotated[list[InputMessage], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: _Tokens | None = None
    temperature: _FromZero | None = None
    top_p: _Share | None = None
    text: TextOptions | None = None
    stream: bool | None = False
    store: bool | None = None
    truncation: Literal["disabled"] | None = None


class EmbeddingBody(Asked):
    """`POST /v1/embeddings`."""

    input: str | Annotated[list[str], Field(min_length=1, max_length=2048)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


class TokenizeBody(Body):
    """`POST /tokenize`."""

    model: str | None = None
    prompt: str


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[_TokenId]
