"""Calls of tools in the text of an answer, in the ways that models write them.

How a model writes calls is seen in its chat template (`tool_format`):

    Hermes, Qwen    <tool_call>{"name": ..., "arguments": {...}}</tool_call>, among text
    Mistral         [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or name[ARGS]{...}
    Llama 3         the answer itself is {"name": ..., "parameters": {...}}; several with ;

What begins like a call and turns out to be none stays text, as it was written.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

_SPACE = " \t\r\n"
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that the model wants called.

    Attributes:
        name: of the function.
        arguments_json: a JSON object.
    """

    name: str
    arguments_json: str


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one family of models writes calls.

    Attributes:
        begin: text before a call; may be a special token.
        end: text after it; "" for none.
        arguments_key: of the object that is a call.
        arguments_mark: text between a bare name and its arguments; "" where a call is an object.
        is_whole_answer: calls without `begin`, as the whole answer, count too.
    """

    begin: str
    end: str = ""
    arguments_key: str = "arguments"
    arguments_mark: str = ""
    is_whole_answer: bool = False

    @property
    def is_list(self) -> bool:
        """Whether calls are items of a JSON list."""
        return not self.end and not self.is_whole_answer

    @property
    def opening(self) -> str:
        """What the prompt may end with, so that a call must follow."""
        if self.is_whole_answer:
            return ""
        return f"{self.begin}\n" if self.end else self.begin

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that the model may write as special tokens."""
        return tuple(mark for mark in (self.begin, self.end, self.arguments_mark) if mark)


HERMES = ToolFormat("<tool_call>", "</tool_call>")
LLAMA = ToolFormat("<|python_tag|>", arguments_key="parameters", is_whole_answer=True)
MISTRAL = ToolFormat("[TOOL_CALLS]")
MISTRAL_NAMED = ToolFormat("[TOOL_CALLS]", arguments_mark="[ARGS]")


def tool_format(template: str) -> ToolFormat | None:
    """How the model of a chat template writes calls; None where that is not known."""
    if not re.search(r"\btools\b", template):
        return None
    if "[TOOL_CALLS]" in template:
        return MISTRAL_NAMED if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template:
        return None if "<function=" in template else HERMES
    if re.search(r"""["']parameters\\?["']\s*:""", template) and "ipython" in template:
        return LLAMA
    return None


class ToolCallParser:
    """Splits the text of an answer that comes in pieces into plain text and calls.

    Nothing is held back but what may still become a call: the beginning of a mark, or a call that
    is not whole yet. Neither text nor calls depend on how the text was cut.

    Attributes:
        calls: those found so far; may be taken away.
    """

    def __init__(self, form: ToolFormat) -> None:
        self.calls: list[ToolCall] = []
        self._has_calls = False
        self._form = form
        self._rest = ""  # not yet known to be text
        self._body: _Body | None = None  # of the call that `_rest` may be
        self._may_be_bare = form.is_whole_answer  # until something else was seen

    def push(self, text: str) -> str:
        """Take more text; returns what is plain text for certain."""
        self._rest += text
        return self._advance(is_last=False)

    def finish(self) -> str:
        """The plain text that is left, now that no more comes."""
        return self._advance(is_last=True)

    def _advance(self, is_last: bool) -> str:
        plain = ""
        while self._rest:
            if self._body is None and not self._begin():
                plain += self._take_text(is_last)
                if self._body is None:
                    break
            assert self._body is not None
            verdict, size = self._body.read(self._rest, is_last)
            if verdict is None:
                break
            if verdict:
                self.calls += verdict
                self._has_calls = True
                self._rest = self._rest[size:]
            else:  # its first character is text; a call may begin behind it
                plain, self._rest = plain + self._rest[:1], self._rest[1:]
                self._may_be_bare = False
            self._body = None
        return plain

    def _begin(self) -> bool:
        """Whether a bare call may begin here, as the whole answer."""
        if not self._may_be_bare:
            return False
        between = f"{_SPACE};" if self._has_calls else _SPACE
        stripped = self._rest.lstrip(between)
        if stripped and not stripped.startswith("{"):
            self._may_be_bare = False
            return False
        self._body = _Body(self._form, 0, between)
        return True

    def _take_text(self, is_last: bool) -> str:
        """Text up to the next mark or what may become one; a call begins at a mark."""
        begin, rest = self._form.begin, self._rest
        at = rest.find(begin)
        if at >= 0:
            self._body = _Body(self._form, len(begin), _SPACE)
        else:
            sizes = range(min(len(begin) - 1, len(rest)), 0, -1)
            held = 0 if is_last else next((n for n in sizes if rest.endswith(begin[:n])), 0)
            at = len(rest) - held
        self._rest = rest[at:]
        return rest[:at]


class _Body:
    """A call from its mark to its end, scanned once as it grows."""

    def __init__(self, form: ToolFormat, at: int, skipped: str) -> None:
        """The call begins at `at`, behind any of the characters `skipped`."""
        self._form, self._at, self._skipped = form, at, skipped
        self._name: str | None = None
        self._start = -1  # of the JSON value
        self._depth, self._in_string, self._escaped = 0, False, False
        self._found: list[ToolCall] = []

    def read(self, text: str, is_last: bool) -> tuple[list[ToolCall] | None, int]:
        """Go on scanning `text`, which begins with the mark and only grows.

        Returns:
            The calls and where they end; no calls where this is none; None while it is not known.
        """
        while not self._found:
            if self._start < 0:
                known = self._find_start(text)
                if not known:
                    return ([] if is_last or known is False else None), 0
            end = self._find_end(text)
            if end is None:
                return ([] if is_last else None), 0
            self._found = _calls(text[self._start : end], self._form.arguments_key, self._name)
            if not self._found:
                return [], 0
        return self._read_end(text, is_last)

    def _find_start(self, text: str) -> bool | None:
        """Whether a value begins where one should; None while that is not known."""
        while self._at < len(text) and text[self._at] in self._skipped:
            self._at += 1
        left = text[self._at :]
        if not left:
            return None
        mark = self._form.arguments_mark
        if mark and left[0] not in "[{":
            name = _NAME.match(left)
            if name is None:
                return False
            behind = left[name.end() : name.end() + len(mark)]
            if behind != mark:
                return None if mark.startswith(behind) else False
            self._name = name[0]
            self._at += name.end() + len(mark)
            return self._find_start_of_arguments(text)
        if left[0] != "{" and not (left[0] == "[" and self._form.is_list):
            return False
        self._start = self._at
        return True

    def _find_start_of_arguments(self, text: str) -> bool | None:
        left = text[self._at :].lstrip(_SPACE)
        if not left:
            self._at -= len(self._form.arguments_mark) + len(self._name or "")
            return None
        self._at = self._start = len(text) - len(left)
        return left[0] == "{"

    def _find_end(self, text: str) -> int | None:
        """Where the brackets of the value close."""
        for at in range(self._at, len(text)):
            character = text[at]
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "[{":
                self._depth += 1
            elif character in "]}":
                self._depth -= 1
                if not self._depth:
                    self._at = at + 1
                    return self._at
        self._at = len(text)
        return None

    def _read_end(self, text: str, is_last: bool) -> tuple[list[ToolCall] | None, int]:
        end = self._form.end
        if not end:
            return self._found, self._at
        left = text[self._at :].lstrip(_SPACE)
        if left.startswith(end):
            return self._found, len(text) - len(left) + len(end)
        if not end.startswith(left):
            return [], 0
        return (self._found, len(text)) if is_last and not left else (([] if is_last else None), 0)


def _calls(text: str, arguments_key: str, name: str | None) -> list[ToolCall]:
    """The calls that a JSON text describes; none where it describes anything else."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return []
    if name is not None:
        value = {"name": name, arguments_key: value}
    calls = [_call(item, arguments_key) for item in (value if isinstance(value, list) else [value])]
    return [] if None in calls else [call for call in calls if call is not None]


def _call(value: Any, arguments_key: str) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get(arguments_key)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _refuse_constant(name: str) -> NoReturn:
    raise json.JSONDecodeError(f"{name} is not JSON", name, 0)
