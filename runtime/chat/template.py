"""Messages to the text of a prompt, of which it is known what the template wrote and what not.

`render_chat` gives (text, trusted) segments for `Tokenizer.encode_segments`: what came from a
message is not trusted and cannot become a control token, however a user writes it.

How the origin of each character is known: the template is rendered twice, once with the messages
as they are, and once with every character of theirs but white space replaced by a stand-in from
Unicode's private use planes. Put back, the stand-ins should
give the first text (they do where the template only copies and trims); then they say which of its
characters are a message's. Where the template looks into a message (splits it at "</think>",
writes it as JSON) they do not. Then the assistant's messages and the tools get stand-ins for the
ends of each special token in them, and nothing else. Should that text hold more special tokens
than the one with all stand-ins (a message was cut so that a new one came to be), the latter is
used: it may differ from the first text, but no message can have written a control token of it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jinja2

from headrace.runtime.chat.sandbox import TemplateSandbox
from headrace.runtime.chat.tool_calls import tool_format
from headrace.runtime.errors import RequestError, TemplateError

Segments = list[tuple[str, bool]]
Positions = Callable[[str], Iterator[int]]
T = TypeVar("T")

ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Planes 15 and 16, without the two noncharacters at the end of each.
_PRIVATE_USE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
# Keys whose values templates compare with names of the API. A value that is no name is covered.
_NAME_KEYS = frozenset({"role", "type"})


class ChatTemplate:
    """A compiled chat template. Thread-safe.

    Attributes:
        takes_tools: whether it speaks of tools.
        tool_format: how the model writes calls of them; None where that is not known.

    Raises:
        TemplateError: it cannot be compiled.
    """

    def __init__(self, source: str) -> None:
        self.takes_tools = re.search(r"\btools\b", source) is not None
        self.tool_format = tool_format(source)
        self._source_characters = frozenset(source)
        self._sandbox = TemplateSandbox()
        self._template = _guarded(lambda: self._sandbox.compile_template(source))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        bos_token: str = "",
        eos_token: str = "",
        tools: Sequence[Mapping[str, Any]] | None = None,
        control_tokens: Collection[str] = (),
    ) -> Segments:
        """Segments of the prompt for a conversation.

        Args:
            messages: objects with `role` and `content`; other keys, such as `tool_calls`, are
                for the template, and with them `content` may be None.
            add_generation_prompt: end with what opens the assistant's answer.
            bos_token, eos_token: for the template to write.
            tools: functions that the model may call, as the template wants them described.
            control_tokens: texts of the model's special tokens (`Tokenizer.control_tokens`).

        Raises:
            RequestError: `messages` is not such a list.
            TemplateError: the template refuses them, fails, or leaves its sandbox.
        """
        check_messages(messages)
        rest = {
            "add_generation_prompt": add_generation_prompt,
            "bos_token": bos_token,
            "eos_token": eos_token,
        }
        copies = [dict(message) for message in messages]
        plain = self._render({"messages": copies, "tools": tools or None, **rest})
        used = self._source_characters.union(plain, bos_token, eos_token)

        def render_covered(open_positions: Positions) -> Segments:
            veil = _Veil(used)
            covered = [
                veil.cover(m, open_positions if m["role"] == "assistant" else _every_visible)
                for m in copies
            ]
            covered_tools = veil.cover(tools or None, open_positions)
            return veil.lift(self._render({"messages": covered, "tools": covered_tools, **rest}))

        hidden = render_covered(_every_visible)
        if _text(hidden) == plain or not control_tokens:
            return hidden
        specials = re.compile("|".join(map(re.escape, sorted(control_tokens, key=len)[::-1])))
        seen = render_covered(_ends_of(specials))
        forged = _count_trusted(specials, seen) > _count_trusted(specials, hidden)
        return hidden if forged else seen

    def _render(self, values: Mapping[str, Any]) -> str:
        return _guarded(lambda: self._sandbox.render_template(self._template, values))


def render_chat(template: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> Segments:
    """`ChatTemplate(template).render(messages, ...)`, for a template that is used once."""
    return ChatTemplate(template).render(messages, **options)


def check_messages(messages: object) -> None:
    """Check that this is a conversation.

    Raises:
        RequestError: says which message is wrong, and how.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError("messages must be a list of {'role': ..., 'content': ...}")
    if not messages:
        raise RequestError("messages is empty; give at least one")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{i}] must be an object with role and content")
        role, content = message.get("role"), message.get("content")
        if not _is_name(role):
            raise RequestError(
                f"messages[{i}] has role {role!r}; expected a name such as system, user, assistant"
            )
        if content is None and message.keys() <= {"role", "content"}:
            raise RequestError(f"messages[{i}] has no content")
        if content is not None and not isinstance(content, str):
            raise RequestError(
                f"messages[{i}] has content of type {type(content).__name__}; expected a string"
            )


class _Veil:
    """Stand-ins for some characters of some texts, and the way back."""

    def __init__(self, used: Collection[str]) -> None:
        """No stand-in is one of the characters `used`."""
        free = (chr(c) for c in itertools.chain(*_PRIVATE_USE))
        self._free = (character for character in free if character not in used)
        self._stand_ins: dict[str, str] = {}

    def cover(self, value: Any, positions: Positions) -> Any:
        """A copy of plain data with stand-ins at these positions of its texts, but not its keys."""
        if isinstance(value, str):
            characters = list(value)
            for position in positions(value):
                characters[position] = self._stand_in(characters[position])
            return "".join(characters)
        if isinstance(value, Mapping):
            return {
                k: v if k in _NAME_KEYS and _is_name(v) else self.cover(v, positions)
                for k, v in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.cover(item, positions) for item in value]
        return value

    def lift(self, text: str) -> Segments:
        """The text with its characters put back, those that had been covered not trusted."""
        originals = {stand_in: original for original, stand_in in self._stand_ins.items()}
        return [
            ("".join(originals.get(character, character) for character in run), trusted)
            for trusted, run in itertools.groupby(text, lambda c: c not in originals)
        ]

    def _stand_in(self, character: str) -> str:
        if character not in self._stand_ins:
            try:
                self._stand_ins[character] = next(self._free)
            except StopIteration:
                raise RequestError("the messages hold too many different characters") from None
        return self._stand_ins[character]


def _is_name(value: object) -> bool:
    return isinstance(value, str) and ROLE.fullmatch(value) is not None


def _every_visible(text: str) -> Iterator[int]:
    return (i for i, character in enumerate(text) if not character.isspace())


def _ends_of(tokens: re.Pattern[str]) -> Positions:
    """First and last characters of the tokens that occur in a text."""

    def positions(text: str) -> Iterator[int]:
        position = 0
        while match := tokens.search(text, position):
            yield match.start()
            yield match.end() - 1
            position = match.start() + 1  # another may begin within this one

    return positions


def _count_trusted(tokens: re.Pattern[str], segments: Segments) -> int:
    return sum(len(tokens.findall(text)) for text, trusted in segments if trusted)


def _text(segments: Segments) -> str:
    return "".join(text for text, _ in segments)


def _guarded(action: Callable[[], T]) -> T:
    """Run template code; whatever it raises becomes a `TemplateError`."""
    try:
        return action()
    except jinja2.TemplateSyntaxError as error:
        reason = f"line {error.lineno}: {error.message}"
    except RecursionError:
        reason = "it recurses too deep"
    except Exception as error:  # a template can raise whatever Python does
        reason = str(error) or type(error).__name__
    raise TemplateError(f"the chat template failed: {reason}")
