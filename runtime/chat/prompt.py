"""A conversation made ready for the engine: its tokens, and how the answer is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.runtime.chat.template import ChatTemplate
from headrace.runtime.chat.tool_choice import CHOICES, Tools, call_grammar, function_names
from headrace.runtime.config import GenerationConfig
from headrace.runtime.errors import ConfigError, RequestError
from headrace.runtime.text import TextStream, TokenTexts


class PromptTokenizer(TokenTexts, Protocol):
    """What a runtime needs of `runtime.tokenizer.Tokenizer`."""

    bos_token: str
    eos_token: str
    control_tokens: tuple[str, ...]

    def encode_prompt(self, text: str) -> list[int]: ...

    def encode_segments(self, segments: Sequence[tuple[str, bool]]) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What `Engine.prepare` takes; `make_text` is None where the usual text is wanted."""

    token_ids: list[int]
    config: GenerationConfig
    make_text: Callable[[GenerationConfig], TextStream] | None


def chat_prompt(
    template: ChatTemplate,
    tokenizer: PromptTokenizer,
    messages: Sequence[Mapping[str, Any]],
    config: GenerationConfig,
    tools: Tools | None,
    tool_choice: str,
) -> ChatPrompt:
    """Render a conversation.

    A call that `tool_choice` forces is begun in the prompt, and a grammar made of the functions'
    schemas holds the answer to the rest of it.

    Raises:
        RequestError: the messages, the tools or the choice are wrong, or the model cannot do that.
        ConfigError: a grammar is asked for beside a forced call.
        TemplateError: the template refuses the messages.
    """
    offered = None if tools is None or tool_choice == "none" else tools
    form, opening = None, ""
    if offered is not None:
        function_names(offered)
        if not template.takes_tools:
            raise RequestError("the model's chat template has no place for tools")
        form = template.tool_format
    if tool_choice not in CHOICES or tool_choice == "required":
        if offered is None:
            raise RequestError(f"tool_choice={tool_choice!r} needs tools")
        if form is None:
            raise RequestError("how this model writes calls is not known, so none can be forced")
        if config.grammar is not None:
            raise ConfigError("grammar", "...", "None where tool_choice forces a call")
        opening = form.opening
        config = dataclasses.replace(config, grammar=call_grammar(offered, tool_choice, form))
    segments = template.render(
        messages,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        tools=offered,
        control_tokens=tokenizer.control_tokens,
    )
    ids = tokenizer.encode_segments([*segments, (opening, True)] if opening else segments)
    if form is None:
        return ChatPrompt(ids, config, None)

    def make_text(request: GenerationConfig) -> TextStream:
        include_stop = request.include_stop_str_in_output
        return TextStream(tokenizer, request.stop, include_stop, form, opening)

    return ChatPrompt(ids, config, make_text)
