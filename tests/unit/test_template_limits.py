"""Templates that ask for more than a chat template has reason to are stopped before it happens.

The limits are lowered here: so the tests are quick, and a lost limit fails one of them instead of
taking the machine with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.exceptions import SecurityError

from headrace.runtime.chat import sandbox_limits
from headrace.runtime.chat.sandbox import TemplateSandbox
from headrace.runtime.chat.sandbox_limits import LimitError, text_size

SANDBOX = TemplateSandbox()


@pytest.fixture
def low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_limits, "MAX_CHARS", 1 << 16)
    monkeypatch.setattr(sandbox_limits, "MAX_WORK", 10_000)


def render(source: str, **values: Any) -> str:
    return SANDBOX.render_template(SANDBOX.compile_template(source), values)


def doubled(expression: str, start: str = "['a']", rounds: int = 15) -> str:
    """A template that puts a value into `expression` again and again."""
    return (
        f"{{% set ns = namespace(s={start}) %}}{{% for i in range({rounds}) %}}"
        f"{{% set ns.s = {expression} %}}{{% endfor %}}"
    )


SHARED = doubled("[ns.s, ns.s]")
LONG = "{% set x = 'a' * 40000 %}"


@pytest.mark.parametrize(
    "source",
    [
        doubled("ns.s ~ ns.s", "'aa'", 16),
        doubled("ns.s + ns.s", "'aa'", 16),
        doubled("ns.s + ns.s", "['a']", 14),
        doubled("ns.s * 2", "['a']", 14),
        doubled("ns.s.replace('a', ns.s)", "'aaaa'", 5),
        doubled("ns.s | replace('a', ns.s)", "'aaaa'", 5),
        doubled("ns.s | join(ns.s)", "'aaaa'", 5),
        doubled("ns.s.join(ns.s)", "'aaaa'", 5),
        doubled("{'a': ns.s, 'b': ns.s}"),
        doubled("(ns.s, ns.s)"),
        doubled("dict(a=ns.s, b=ns.s)"),
        SHARED,
        SHARED + "{{ ns.s }}",
        SHARED + "{{ '%s' % ns.s }}",
        SHARED + "{{ '{}'.format(ns.s) }}",
        SHARED + "{{ raise_exception(ns.s) }}",
        "{% set f = '%(a)s' * 100 %}" + LONG + "{{ f % {'a': x} }}",
        "{% set f = '{0}' * 100 %}" + LONG + "{{ f.format(x) }}",
        LONG + "{% set a = [x, x] %}",
        LONG + "{% set a = [x] * 2 %}",
        LONG + "{% set a = [x] + [x] %}",
        LONG + "{{ x }}{{ x }}",
        LONG + "{{ range(1000) | map('replace', '1', x) | list | length }}",
        LONG + "{{ ([nothing] * 3) | map('default', x) | list }}",
        "{{ '%9999999d' % 1 }}",
        "{{ '%*d' % (9999999, 1) }}",
        "{{ '{:9999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 9999999) }}",
        "{{ 7 ** 9999 }}",
        "{{ ('f' * 5000) | int(base=16) }}",
        "{{ 5 | round(100000, 'ceil') }}",
        "{{ 'a\nb' | indent(9999999) }}",
        "{{ 'a\nb' | indent('x' * 1000) }}",
        "{{ [1] | tojson(indent=9999999) }}",
        "{{ strftime_now('%Y' * 1000) }}",
        "{% for i in range(200) %}{% for j in range(200) %}{% endfor %}{% endfor %}",
        "{% for i in [1] recursive %}{{ loop([1, 1]) if loop.depth < 15 }}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(14) }}",
    ],
)
@pytest.mark.usefixtures("low_limits")
def test_what_would_take_too_much_is_refused(source: str) -> None:
    with pytest.raises(LimitError):
        render(source)


BIG = "a" * 1000


@pytest.mark.usefixtures("low_limits")
@pytest.mark.parametrize(
    "check",
    [
        lambda: sandbox_limits.check_string_call(BIG, "replace", ("a", BIG), {}),
        lambda: sandbox_limits.check_string_call(BIG, "join", ([BIG] * 50,), {}),
        lambda: sandbox_limits.check_string_call("{0}" * 100, "format", (BIG,), {}),
        lambda: sandbox_limits.check_string_call("{a}" * 100, "format", (), {"a": BIG}),
        lambda: sandbox_limits.check_filter("replace", BIG, ("a", BIG)),
        lambda: sandbox_limits.check_filter("join", [BIG] * 100, ()),
        lambda: sandbox_limits.check_filter("indent", "\n" * 2000, ()),
        lambda: sandbox_limits.check_filter("string", [BIG] * 100, ()),
        lambda: sandbox_limits.check_operands("*", [BIG], 100),
        lambda: sandbox_limits.check_operands("*", 100, BIG),
        lambda: sandbox_limits.check_operands("+", BIG * 40, BIG * 40),
        lambda: sandbox_limits.check_operands("%", "%s" * 100, BIG),
        lambda: sandbox_limits.check_operands("**", 10, 10**9),
    ],
)
def test_it_is_refused_before_it_is_made(check: Callable[[], object]) -> None:
    with pytest.raises(LimitError):
        check()


@pytest.mark.parametrize(
    "source",
    [
        "{{ (1).to_bytes(9) }}",
        "{{ 1.5.hex() }}",
        "{{ 'a'.center(9) }}",
        "{{ 'a'.encode() }}",
        "{{ 'a' | attr('zfill') }}",
        "{{ [1] | map(attribute='__class__') | list }}",
        "{{ '{0.__class__}'.format('a') }}",
        "{{ strftime_now.__globals__ }}",
        "{{ self._TemplateReference__context }}",
        "{% for i in [1] %}{{ loop._iterator }}{% endfor %}",
    ],
)
def test_attributes_that_no_template_needs_are_refused(source: str) -> None:
    with pytest.raises(SecurityError):
        render(source)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ [1, [2, 'a']] }}", "[1, [2, 'a']]"),
        ("{{ {'a': (1, b)} }}", "{'a': (1, 'B')}"),
        ("{% set x, y = b, 1 %}{{ y }}{{ x }}", "1B"),
        ("{% for k, v in {'k': b}.items() %}{{ k }}{{ v }}{% endfor %}", "kB"),
        ("{{ b in ('A', 'B') }}", "True"),
        ("{{ '%s-%d' % (b, 7) }}", "B-7"),
        ("{{ '{0}{x}'.format(b, x=1) }}", "B1"),
        ("{{ dict(a=b)['a'] ~ ([b] * 2) | join('+') }}", "BB+B"),
        ("{{ [1, 2] + [b] }}", "[1, 2, 'B']"),
        ("{{ '12' | int + 3.5 | round(1) }}", "15.5"),
        ("{{ 'x\ny' | indent(2) }}", "x\n  y"),
        ("{% set ns = namespace(l=[]) %}{% set ns.l = ns.l + [b] %}{{ ns.l | tojson }}", '["B"]'),
        ("{{ 2 ** 10 }}", "1024"),
    ],
)
def test_ordinary_use_of_what_is_watched_works(source: str, text: str) -> None:
    assert render(source, b="B") == text


TREES = st.recursive(
    st.none() | st.integers(-999, 999) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(TREES)
def test_text_size_is_near_the_written_size(value: Any) -> None:
    written = len(str(value).encode("ascii", "replace"))
    assert text_size(value) <= 16 * written + 16
    assert written <= 10 * text_size(value) + 2  # a character may be written as \U0001f600


@pytest.mark.usefixtures("low_limits")
def test_counting_ends_where_the_limit_is() -> None:
    value: list[Any] = []
    for _ in range(100):  # written out, 2**100 lists
        value = [value, value]
    with pytest.raises(LimitError):
        text_size(value)
