"""A Jinja environment for chat templates, which come with a model and are not trusted.

Jinja's immutable sandbox keeps a template from reaching Python's internals and from changing what
it is given. On top of it, work and size are bounded without a thread or a signal: loops, calls,
filters, operators and new lists go through hooks that charge a budget of the render, and what
would be too large is refused before it is made (`sandbox_limits`).

The dialect is that of transformers: `trim_blocks`, `lstrip_blocks`, loop controls,
`raise_exception`, `strftime_now`, `tojson` without HTML escapes, `{% generation %}`.
"""

from __future__ import annotations

import functools
import json
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

from headrace.runtime.chat.sandbox_limits import (
    Budget,
    LimitError,
    as_text,
    check_chars,
    check_filter,
    check_indent,
    check_join,
    check_layout,
    check_operands,
    check_size,
    check_string_call,
)

MAX_SOURCE_CHARS = 1 << 18
_MAX_MESSAGE_CHARS = 1000


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FILTERS = _words(
    """
    abs attr capitalize count d default dictsort e escape first float forceescape groupby indent
    int items join last length list lower map max min reject rejectattr replace reverse round
    safe select selectattr sort string sum title tojson trim truncate unique upper urlencode
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
# Names that no template can spell.
_LOOP, _CONCAT, _MADE = "for loop", "~ operator", "list or dict"

_BUDGET: ContextVar[Budget] = ContextVar("headrace_template_budget")


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
        self.filters = {**guarded, _LOOP: _count_rounds, _CONCAT: _concat, _MADE: _made}
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def compile_template(self, source: str) -> jinja2.Template:
        """Compile; a template too long, wrong or beyond the sandbox raises `jinja2.TemplateError`
        or whatever Python raises."""
        if len(source) > MAX_SOURCE_CHARS:
            raise LimitError(f"its source has more than {MAX_SOURCE_CHARS} characters")
        token = _BUDGET.set(Budget())  # constant expressions are computed here
        try:
            tree = _Instrument().visit(self.parse(source))
            tree.set_environment(self)
            return self.from_string(tree)
        finally:
            _BUDGET.reset(token)

    def render_template(self, template: jinja2.Template, values: Mapping[str, Any]) -> str:
        """Render under a budget of its own; raises like `compile_template`."""
        token = _BUDGET.set(Budget())
        try:
            parts, size = [], 0
            for part in template.generate(**values):
                parts.append(part)
                size += len(part)
                check_chars(size)
            return "".join(parts)
        finally:
            _BUDGET.reset(token)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        _spend()
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            args = check_string_call(owner, method.__name__, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        check_size(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _spend()
        check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr not in _STRING_METHODS:
            return False
        if isinstance(obj, (int, float, bytes)):  # (1).to_bytes(10**9)
            return False
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"it asks for {attribute!r} of {type(obj).__name__!r}, which is unsafe")


def _raise_exception(message: object = "the template refused the messages") -> None:
    raise jinja2.TemplateError(as_text(message)[:_MAX_MESSAGE_CHARS])


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(check_layout(layout))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None:
        check_indent(indent)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _guard_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    value_at = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)  # keeps the marks by which jinja passes a context
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _spend()
        rest = (*args[value_at + 1 :], *kwargs.values())
        value = check_filter(name, args[value_at], rest)
        result = function(*args[:value_at], value, *args[value_at + 1 :], **kwargs)
        check_size(result)
        return result

    return guarded


@jinja2.pass_context
def _count_rounds(context: Context, values: Iterable[Any], literal_chars: int) -> Iterator[Any]:
    for value in values:
        _spend(literal_chars)
        yield value


def _concat(values: list[Any]) -> str:
    _spend()
    check_join(values, "")
    return "".join(map(str, values))


def _made(value: Any) -> Any:
    _spend()
    check_size(value)
    return value


def _finalize(value: Any) -> str:
    text = as_text(value)
    _spend(len(text))
    return text


class _Instrument(NodeTransformer):
    """Routes what `call`, filters and operators do not see through filters that charge for it."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        literal = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.iter = _filter(node.iter, _LOOP, [nodes.Const(literal)])
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), _CONCAT, [])

    def visit_List(self, node: nodes.List) -> nodes.Expr:  # noqa: N802
        return self._made(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:  # noqa: N802
        return self._made(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:  # noqa: N802
        return self._made(node) if node.ctx == "load" else node

    def _made(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        constant = all(isinstance(n, (nodes.Const, nodes.Pair)) for n in node.find_all(nodes.Expr))
        return node if constant else _filter(node, _MADE, [])


def _filter(value: nodes.Node, name: str, args: list[nodes.Expr]) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, value), name, args, [], None, None, lineno=value.lineno)


class _GenerationTag(Extension):
    """`{% generation %}` marks an assistant's words for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
