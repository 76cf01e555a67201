"""From what callers give to requests that an engine takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headrace.runtime.answer import Request
from headrace.runtime.chat.prompt import ChatPrompt, PromptTokenizer, chat_prompt
from headrace.runtime.chat.template import ChatTemplate
from headrace.runtime.chat.tool_choice import Tools
from headrace.runtime.config import GenerationConfig
from headrace.runtime.engine import Engine
from headrace.runtime.errors import HeadraceError, RequestError
from headrace.runtime.prompts import Messages, as_token_ids


class Preparer:
    """Makes requests. Any thread; each method raises what is wrong with what it is given.

    Args:
        chat_template: of the model, or None.

    Raises:
        TemplateError: the template cannot be compiled.
    """

    def __init__(
        self, engine: Engine, tokenizer: PromptTokenizer, chat_template: str | None
    ) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._template = None if chat_template is None else ChatTemplate(chat_template)

    def request(self, prompt: Any, config: GenerationConfig) -> Request:
        """Of one prompt: a text or token ids."""
        return self._engine.prepare(self.token_ids(prompt), config)

    def requests(self, prompts: Iterable[Any], config: GenerationConfig) -> list[Request]:
        """Of many; an error names the prompt's index."""
        requests = []
        for index, prompt in enumerate(prompts):
            try:
                requests.append(self.request(prompt, config))
            except HeadraceError as error:
                error.args = (f"prompt {index}: {error}",)
                raise
        return requests

    def chat_request(
        self,
        messages: Messages,
        config: GenerationConfig,
        tools: Tools | None = None,
        tool_choice: str = "auto",
    ) -> Request:
        """Of a conversation."""
        prompt = self.chat_prompt(messages, config, tools, tool_choice)
        return self._engine.prepare(prompt.token_ids, prompt.config, prompt.make_text)

    def chat_prompt(
        self,
        messages: Messages,
        config: GenerationConfig,
        tools: Tools | None = None,
        tool_choice: str = "auto",
    ) -> ChatPrompt:
        if self._template is None:
            raise RequestError("the model has no chat template; use generate with a whole prompt")
        return chat_prompt(self._template, self._tokenizer, messages, config, tools, tool_choice)

    def token_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self._tokenizer.encode_prompt(prompt)
        return as_token_ids(prompt)
