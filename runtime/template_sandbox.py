"""A Jinja environment for chat templates, which come with a model and are not trusted.

Jinja's immutable sandbox keeps a template from reaching Python's internals and from changing what
it is given. On top of it, work and size are bounded without a thread or a signal: loops, calls,
filters and operators go through hooks that charge a budget of the render, and what could grow a
value is refused before it is made. Not bounded is what one hook-free operation can take: comparing
deeply shared lists, for one.

The dialect is that of transformers: `trim_blocks`, `lstrip_blocks`, loop controls,
`raise_exception`, `strftime_now`, `tojson` without HTML escapes, `{% generation %}`.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SOURCE_CHARS = 1 << 18
MAX_CHARS = 1 << 24  # of one value, and of all output
MAX_WORK = 300_000  # loop rounds, calls, filters, operators
MAX_SECONDS = 3.0
_MAX_INT_BITS = 4096
_MAX_INDENT = 64


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FILTERS = _words(
    """
    abs attr capitalize count d default dictsort e escape first float forceescape groupby indent
    int items join last length list lower map max min reject rejectattr replace reverse round
    safe select selectattr sort string sum title tojson trim truncate unique upper urlencode
    wordcount
    """
)
_STRING_METHODS = _words(
    """
    capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal
    isdigit islower isnumeric isspace istitle isupper join lower lstrip partition removeprefix
    removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines startswith strip
    swapcase title upper
    """
)
# Filters that do not write their first argument out as text.
_STRUCTURAL = _words(
    """
    attr count d default dictsort first groupby items last length list map max min reject
    rejectattr reverse select selectattr sort sum unique
    """
)
_WIDE_FORMAT = re.compile(r"\d{4}|\{[^}]*\{|\*")  # a width of thousands, or a computed one

# Names that no template can spell.
_LOOP, _CONCAT = "for loop", "~ operator"


class LimitError(SecurityError):
    """The template did more than a chat template has reason to."""


class _Budget:
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


_BUDGET: ContextVar[_Budget] = ContextVar("headrace_template_budget")


def _spend(chars: int = 0) -> None:
    _BUDGET.get().spend(chars)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles and renders chat templates. Thread-safe."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
            finalize=_finalize,
        )
        guarded = {n: _guard_filter(n, f) for n, f in self.filters.items() if n in _FILTERS}
        guarded["tojson"] = _guard_filter("tojson", _tojson)
        self.filters = {**guarded, _LOOP: _count_rounds, _CONCAT: _concat}
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def compile_template(self, source: str) -> jinja2.Template:
        """Compile; a template too long, wrong or beyond the sandbox raises `jinja2.TemplateError`
        or whatever Python raises."""
        if len(source) > MAX_SOURCE_CHARS:
            raise LimitError(f"its source has more than {MAX_SOURCE_CHARS} characters")
        token = _BUDGET.set(_Budget())  # constant expressions are computed here
        try:
            tree = _ChargeLoops().visit(self.parse(source))
            tree.set_environment(self)
            return self.from_string(tree)
        finally:
            _BUDGET.reset(token)

    def render_template(self, template: jinja2.Template, values: Mapping[str, Any]) -> str:
        """Render under a budget of its own; raises like `compile_template`."""
        token = _BUDGET.set(_Budget())
        try:
            parts, size = [], 0
            for part in template.generate(**values):
                parts.append(part)
                size += len(part)
                if size > MAX_CHARS:
                    raise LimitError("it writes too much")
            return "".join(parts)
        finally:
            _BUDGET.reset(token)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        _spend()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            args = _check_string_call(owner, __obj.__name__, args)
        result = super().call(__context, __obj, *args, **kwargs)
        _check_size(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _spend()
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, (str, bytes)) and attr not in _STRING_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"it asks for {attribute!r} of {type(obj).__name__!r}, which is unsafe")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE_FORMAT.search(value.__self__):
            raise LimitError("it formats with a computed or very large width")
        return wrapped


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None and indent > _MAX_INDENT:
        raise LimitError("it indents too far")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _guard_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    value_at = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)  # keeps the marks by which jinja passes a context
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _spend()
        value, rest = args[value_at], (*args[value_at + 1 :], *kwargs.values())
        if name not in _STRUCTURAL:
            _check_written(value)
        if name == "join":
            value = list(value)
            _check_join(value, rest[0] if rest else "")
        elif name == "replace" and len(rest) >= 2:
            _check_replace(str(value), str(rest[0]), str(rest[1]))
        elif name == "indent":
            width = max([len(a) if isinstance(a, str) else int(a) for a in rest] or [4])
            if width > _MAX_INDENT:
                raise LimitError("it indents too far")
            _check_replace(str(value), "\n", " " * width)
        result = function(*args[:value_at], value, *args[value_at + 1 :], **kwargs)
        _check_size(result)
        return result

    return guarded


@jinja2.pass_context
def _count_rounds(context: Context, values: Iterable[Any], literal_chars: int) -> Iterator[Any]:
    for value in values:
        _spend(literal_chars)
        yield value


def _concat(values: list[Any]) -> str:
    _spend()
    for value in values:
        _check_written(value)
    texts = [str(value) for value in values]
    _check_join(texts, "")
    return "".join(texts)


def _finalize(value: Any) -> Any:
    if isinstance(value, str):
        _spend(len(value))
    else:
        _check_written(value)
        value = str(value)
        _spend(len(value))
    return value


def _check_string_call(owner: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Refuse a method call that would grow a string too far; returns the arguments to pass."""
    if name == "join" and args:
        items = list(args[0])
        _check_join(items, owner)
        return (items, *args[1:])
    if name == "replace" and len(args) >= 2:
        _check_replace(owner, str(args[0]), str(args[1]))
    return args


def _check_operands(operator: str, left: Any, right: Any) -> None:
    if operator == "%" and isinstance(left, str):
        if _WIDE_FORMAT.search(left):
            raise LimitError("it formats with a computed or very large width")
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else 0
        if max(left.bit_length() + right.bit_length(), bits) > _MAX_INT_BITS:
            raise LimitError("it computes with very large numbers")
    elif operator == "*":
        times = left if isinstance(left, int) else right
        sized = right if isinstance(left, int) else left
        if isinstance(times, int) and hasattr(sized, "__len__"):
            _check_chars(len(sized) * times)
    elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
        _check_chars(len(left) + len(right))


def _check_join(values: list[Any], separator: object) -> None:
    total = len(values) * len(str(separator))
    for value in values:
        _check_written(value)
        total += len(value) if isinstance(value, str) else len(str(value))
        _check_chars(total)


def _check_replace(text: str, old: str, new: str) -> None:
    _check_chars(len(text) + text.count(old) * len(new))


def _check_size(value: Any) -> None:
    if isinstance(value, (str, list, tuple, dict)):
        _check_chars(len(value))


def _check_chars(count: int) -> None:
    if count > MAX_CHARS:
        raise LimitError("it makes a value that is too large")


def _check_written(value: Any) -> None:
    """Refuse a value whose text would be too long, by counting it as deep as it goes."""
    if not isinstance(value, (list, tuple, dict)):
        return
    total, todo = 0, [value]
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            todo.extend(item.keys())
            todo.extend(item.values())
        elif isinstance(item, (list, tuple)):
            todo.extend(item)
        total += len(item) if isinstance(item, str) else 16
        _check_chars(max(total, 16 * len(todo)))


class _ChargeLoops(NodeTransformer):
    """Routes what `call`, filters and operators do not see through filters that charge for it."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        literal = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.iter = _filter(node.iter, _LOOP, [nodes.Const(literal)])
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), _CONCAT, [])


def _filter(value: nodes.Node, name: str, args: list[nodes.Expr]) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, value), name, args, [], None, None, lineno=value.lineno)


class _GenerationTag(Extension):
    """`{% generation %}` marks an assistant's words for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
