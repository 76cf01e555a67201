"""What an answer may be: a JSON schema, a regular expression, or a grammar in Lark's notation.

A `Grammar` is plain data. Whether it makes sense is found out when a request is prepared
(`runtime.grammar.matcher`), for it needs the model's vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.runtime.errors import ConfigError

MAX_GRAMMAR_BYTES = 64 * 1024  # a schema of 2,000 properties; compiling one takes seconds
KINDS = ("json_schema", "regex", "lark")

_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Grammar:
    """Texts that an answer may be. The whole answer is one of them, from its first character.

    Attributes:
        kind: "json_schema", "regex" or "lark".
        text: the schema as JSON, the expression, or the grammar.

    Raises:
        ConfigError: not such a kind, no text, or a text of more than 64 KiB.
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError("grammar", self.kind, f"one of {', '.join(KINDS)}")
        if not isinstance(self.text, str) or not self.text.strip():
            raise ConfigError("grammar", self.text, f"the text of a {self.kind}, not empty")
        try:
            size_bytes = len(self.text.encode())
        except UnicodeEncodeError:
            raise ConfigError("grammar", _short(self.text), "Unicode without surrogates") from None
        if size_bytes > MAX_GRAMMAR_BYTES:
            limit = f"at most {MAX_GRAMMAR_BYTES} bytes, not {size_bytes}"
            raise ConfigError("grammar", _short(self.text), limit)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that a schema allows, on one line, with `", "` and `": "` between its parts.

        No other white space is possible, so an answer cannot get stuck in it. Properties come in
        the order of the schema.

        Args:
            schema: plain data or its JSON text.

        Raises:
            ConfigError: it is not JSON, no object, or too large.
        """
        expected = "a JSON schema, which is an object"
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
            # One that is too long is refused below, unread.
            parsed = json.loads(text) if len(text) <= MAX_GRAMMAR_BYTES else {}
        except (TypeError, ValueError, RecursionError) as error:
            reason = f"{expected} ({error or type(error).__name__})"
            shown = _short(schema) if isinstance(schema, str) else type(schema).__name__
            raise ConfigError("grammar", shown, reason) from None
        if not isinstance(parsed, dict):
            raise ConfigError("grammar", _short(text), expected)
        return cls("json_schema", text)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Texts that an expression matches as a whole, in the syntax of Rust's regex crate, which
        has no look-around and no back-references."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """A context-free grammar in llguidance's variant of Lark's EBNF; its rule is `start`."""
        return cls("lark", text)


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
