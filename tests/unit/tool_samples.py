"""Chat templates of families that call tools, two tools, and runtimes that know them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from grammar_samples import EOS, SPECIAL, VOCAB, PieceTokenizer, make_grammar_engine

from headrace.backends.fake import scripted_logits
from headrace.runtime.api import Runtime
from headrace.runtime.chat.tool_calls import HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, ToolFormat

HERMES_TEMPLATE = """{% if tools %}Tools: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer a call as <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}
{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>
{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
LLAMA_TEMPLATE = """{% if tools %}Environment: ipython
Answer with {"name": function name, "parameters": dictionary of arguments}.
{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.tool_calls %}
{{ '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}{% endif %}
{% endfor %}assistant: """
MISTRAL_TEMPLATE = """{% for m in messages %}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}
[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]{% if m.tool_calls %}[TOOL_CALLS][
{{ m.tool_calls | tojson }}]{% endif %}{% endfor %}"""
NAMED_TEMPLATE = MISTRAL_TEMPLATE.replace("[TOOL_CALLS][", "[TOOL_CALLS]f[ARGS]")
TEMPLATES: dict[str, tuple[str, ToolFormat | None]] = {
    "hermes": (HERMES_TEMPLATE, HERMES),
    "llama": (LLAMA_TEMPLATE, LLAMA),
    "mistral": (MISTRAL_TEMPLATE, MISTRAL),
    "mistral_named": (NAMED_TEMPLATE, MISTRAL_NAMED),
    "other": ("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}", None),
    "xml": (HERMES_TEMPLATE.replace("Tools: ", "<function=f>"), None),
    "none": ("{% for m in messages %}<tool_call>{{ m.content }}{% endfor %}", None),
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"$ref": "#/$defs/digit"},
                "b": {"type": "array", "items": {"$ref": "#/$defs/digit"}, "maxItems": 2},
            },
            "required": ["a"],
            "additionalProperties": False,
            "$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
        },
    },
}
SAY = {
    "type": "function",
    "function": {
        "name": "say",
        "parameters": {
            "properties": {"text": {"type": "string", "maxLength": 5}},
            "required": ["text"],
            "additionalProperties": False,
        },
    },
}


class ChatTokenizer(PieceTokenizer):
    """Token `SPECIAL` is the special token [TOOL_CALLS]."""

    bos_token, eos_token = "", ""
    control_tokens: tuple[str, ...] = ("[TOOL_CALLS]",)

    def special_marks(self, texts: Iterable[str]) -> dict[int, bytes]:
        return {SPECIAL: b"[TOOL_CALLS]"} if "[TOOL_CALLS]" in texts else {}

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode_fragment(text)

    def encode_segments(self, segments: Sequence[tuple[str, bool]]) -> list[int]:
        return self.encode_fragment("".join(text for text, _ in segments))


def make_runtime(family: str, logits: Callable[[Sequence[int]], Any] | None = None) -> Runtime:
    engine = make_grammar_engine(logits, context_tokens=1500, max_sequences=2)
    return Runtime(engine, ChatTokenizer(), chat_template=TEMPLATES[family][0])


def writer(text: str) -> Callable[[Sequence[int]], Any]:
    """Logits of a model that writes a text after any conversation."""
    encode = ChatTokenizer().encode_fragment
    ids, opening = encode(text), encode("\nassistant: ")

    def script(prefix: Sequence[int]) -> int:
        ends = (i for i in range(len(prefix), 0, -1) if prefix[i - len(opening) : i] == opening)
        at = len(prefix) - next(ends)
        return ids[at] if at < len(ids) else EOS

    return scripted_logits(VOCAB, script)
