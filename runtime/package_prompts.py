"""Prompts as the model of a package takes them, without loading it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from headrace.runtime.chat.prompt import chat_prompt
from headrace.runtime.chat.template import ChatTemplate
from headrace.runtime.config import GenerationConfig
from headrace.runtime.factory import read_chat_template
from headrace.runtime.manifest import Manifest
from headrace.runtime.tokenizer import Tokenizer


def encode_prompts(package: Path, manifest: Manifest, prompts: Iterable[str]) -> list[list[int]]:
    """Token ids of each as the one message of a chat, or as it is without a chat template.

    Raises:
        PackageError: tokenizer or template cannot be read.
        TemplateError: the template refuses a message.
    """
    tokenizer = Tokenizer.load(package, manifest.tokenizer)
    source = read_chat_template(package, manifest)
    if source is None:
        return [tokenizer.encode_prompt(prompt) for prompt in prompts]
    template, config = ChatTemplate(source), GenerationConfig()
    conversations = ([{"role": "user", "content": prompt}] for prompt in prompts)
    return [
        chat_prompt(template, tokenizer, messages, config, None, "auto").token_ids
        for messages in conversations
    ]
