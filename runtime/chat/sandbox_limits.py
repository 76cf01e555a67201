"""How much a chat template may do: a budget of work, and the sizes of values.

Every list, tuple, dict and string that a template makes is at most `MAX_CHARS` characters long when
written out, lists within lists included. That is checked before a value is made, since a few
characters of template can ask for more memory than there is: by repeating, by joining, or by
putting a list into a list twice, and that again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, ValuesView
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

MAX_CHARS = 1 << 22  # of one value, and of all output
MAX_WORK = 300_000  # loop rounds, calls, filters, operators
MAX_SECONDS = 3.0
MAX_INDENT = 64
_MAX_INT_BITS = 4096
_MAX_INT_CHARS = 1000
_MAX_DIGITS = 100
_MAX_LAYOUT_CHARS = 256
_OTHER_CHARS = 16  # what a number, None or an empty list counts for
_MAX_FIELD_CHARS = 1000  # a format's widths have three digits at most

_WIDE_FORMAT = re.compile(r"\d{4}|\{[^}]*\{|\*")  # a width of thousands, or a computed one
# Filters that write out whatever they are given.
_WRITING_FILTERS = frozenset(
    {
        *("capitalize", "e", "escape", "forceescape", "lower", "safe", "string", "title"),
        *("tojson", "trim", "truncate", "upper", "urlencode"),
    }
)
_CONTAINERS = (list, tuple, Mapping, Namespace, KeysView, ValuesView, ItemsView)


class LimitError(SecurityError):
    """The template did more than a chat template has reason to."""


class Budget:
    """Work, output and time of one render. Time is a last resort, so that results do not depend
    on the machine's speed where they need not."""

    def __init__(self) -> None:
        self._work, self._chars = 0, 0
        self._deadline = time.monotonic() + MAX_SECONDS

    def spend(self, chars: int = 0) -> None:
        """Charge one unit of work and `chars` characters of output.

        Raises:
            LimitError: work, characters or time are used up.
        """
        self._work += 1
        self._chars += chars
        if self._work > MAX_WORK or time.monotonic() > self._deadline:
            raise LimitError("it runs too long")
        if self._chars > MAX_CHARS:
            raise LimitError("it writes too much")


def check_chars(count: int) -> None:
    if count > MAX_CHARS:
        raise LimitError("it makes a value that is too large")


def text_size(value: Any) -> int:
    """Characters of `value` written out, about, as deep as it goes.

    Raises:
        LimitError: they are more than a value may have; counting ends there.
    """
    if isinstance(value, str):
        return len(value)
    total, todo = 0, [value]
    while todo:
        item = todo.pop()
        total += len(item) if isinstance(item, str) else _OTHER_CHARS
        if isinstance(item, Namespace):
            item = item._Namespace__attrs
        if isinstance(item, Mapping):
            item = item.items()
        if isinstance(item, _CONTAINERS):
            todo.extend(item)
        check_chars(max(total, _OTHER_CHARS * len(todo)))
    return total


def check_size(value: Any) -> None:
    """Refuse a value that is too large. Of what is no container or string nothing is known."""
    if isinstance(value, (str, *_CONTAINERS)):
        check_chars(text_size(value))


def as_text(value: Any) -> str:
    """str(value), refused before it is made where it would be too long."""
    check_size(value)
    return str(value)


def check_join(values: Iterable[Any], separator: Any) -> None:
    between = len(as_text(separator))
    total = 0
    for value in values:
        total += between + text_size(value)
        check_chars(total)


def check_replace(text: str, old: str, new: str) -> None:
    check_chars(len(text) + text.count(old) * len(new))


def check_format(layout: str, mark: str, values: Any) -> None:
    """Refuse `layout % values` or `layout.format(*values)`; `mark` begins a field."""
    if _WIDE_FORMAT.search(layout):
        raise LimitError("it formats with a computed or very large width")
    check_chars(len(layout) + layout.count(mark) * (_MAX_FIELD_CHARS + text_size(values)))


def check_operands(operator: str, left: Any, right: Any) -> None:
    """Refuse `+ * ** %` on operands whose result would be too large."""
    if operator == "%" and isinstance(left, str):
        check_format(left, "%", right)
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else 0
        if max(left.bit_length() + right.bit_length(), bits) > _MAX_INT_BITS:
            raise LimitError("it computes with very large numbers")
    elif operator == "*" and isinstance(left, int):
        check_chars(text_size(right) * left)
    elif operator == "*" and isinstance(right, int):
        check_chars(text_size(left) * right)
    elif operator == "+":
        check_chars(text_size(left) + text_size(right))


def check_string_call(owner: str, name: str, args: tuple[Any, ...], kwargs: Any) -> tuple[Any, ...]:
    """Refuse a method call that would grow a string too far; returns the arguments to pass."""
    if name == "join" and args:
        items = list(args[0])
        check_join(items, owner)
        return (items, *args[1:])
    if name == "replace" and len(args) >= 2:
        check_replace(owner, as_text(args[0]), as_text(args[1]))
    if name == "format":
        check_format(owner, "{", [args, kwargs])
    return args


def check_filter(name: str, value: Any, rest: tuple[Any, ...]) -> Any:
    """Refuse a filter that would make too large a value; returns the value to filter."""
    if name in _WRITING_FILTERS:
        check_size(value)
    check = _FILTER_CHECKS.get(name)
    return value if check is None else check(value, rest)


def check_layout(layout: str) -> str:
    """The layout of a date, if it is no longer than such are."""
    if len(layout) > _MAX_LAYOUT_CHARS:
        raise LimitError("it formats the date at length")
    return layout


def check_indent(width: Any) -> None:
    if (len(width) if isinstance(width, str) else int(width)) > MAX_INDENT:
        raise LimitError("it indents too far")


def _check_join_filter(value: Any, rest: tuple[Any, ...]) -> Any:
    items = list(value)
    check_join(items, rest[0] if rest else "")
    return items


def _check_replace_filter(value: Any, rest: tuple[Any, ...]) -> Any:
    if len(rest) >= 2:
        check_replace(as_text(value), as_text(rest[0]), as_text(rest[1]))
    return value


def _check_indent_filter(value: Any, rest: tuple[Any, ...]) -> Any:
    for width in rest:
        check_indent(width)
    check_replace(as_text(value), "\n", " " * MAX_INDENT)
    return value


def _check_int_filter(value: Any, rest: tuple[Any, ...]) -> Any:
    if isinstance(value, str) and len(value) > _MAX_INT_CHARS:
        raise LimitError("it computes with very large numbers")
    return value


def _check_round_filter(value: Any, rest: tuple[Any, ...]) -> Any:
    if any(isinstance(item, int) and abs(item) > _MAX_DIGITS for item in rest):
        raise LimitError("it rounds to very many digits")
    return value


_FILTER_CHECKS: dict[str, Callable[[Any, tuple[Any, ...]], Any]] = {
    "join": _check_join_filter,
    "replace": _check_replace_filter,
    "indent": _check_indent_filter,
    "int": _check_int_filter,
    "round": _check_round_filter,
}
