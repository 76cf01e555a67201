"""Tool calls in answers: found in every family's way of writing them, however the text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.runtime.chat.tool_calls import (
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_NAMED,
    ToolCall,
    ToolCallParser,
    ToolFormat,
)

FORMATS = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "mistral_named": MISTRAL_NAMED}


def parse(form: ToolFormat, *pieces: str) -> tuple[str, list[ToolCall]]:
    parser = ToolCallParser(form)
    text = "".join([parser.push(piece) for piece in pieces]) + parser.finish()
    return text, parser.calls


ONE = ToolCall("add", '{"a": 1}')
CASES: list[tuple[ToolFormat, str, str, list[ToolCall]]] = [
    (HERMES, '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "", [ONE]),
    (
        HERMES,
        'Sure. <tool_call>{"name":"add","arguments":{"a":1}}</tool_call>\n'
        '<tool_call>{"arguments":{"a":1},"name":"add"}</tool_call> done',
        "Sure. \n done",
        [ONE, ONE],
    ),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}}', "", [ONE]),  # ended by its token
    (
        HERMES,
        '<tool_call>{"name": "say", "arguments": {"t": "}</tool_call>\\""}}</tool_call>',
        "",
        [ToolCall("say", '{"t": "}</tool_call>\\""}')],
    ),
    (LLAMA, '{"name": "add", "parameters": {"a": 1}}', "", [ONE]),
    (LLAMA, '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', "", [ONE]),
    (
        LLAMA,
        '\n{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 1}}',
        "",
        [ONE, ONE],
    ),
    (MISTRAL, '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]', "", [ONE]),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "x"}, '
        '{"name": "add", "arguments": {"a": 1}}]',
        "",
        [ONE, ONE],
    ),
    (MISTRAL_NAMED, '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS] {"a": 1}', "", [ONE, ONE]),
    (MISTRAL_NAMED, '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]', "", [ONE]),
]
TEXTS: list[tuple[ToolFormat, str]] = [
    (HERMES, "The marker is <tool_call>, you see."),
    (HERMES, '<tool_call>{"name": "add"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>'),
    (HERMES, '<tool_call>{"name": "add", "arguments": "a"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}} and </tool_call>'),
    (HERMES, '<tool_call>[{"name": "add", "arguments": {"a": 1}}]</tool_call>'),
    (HERMES, "<tool_call>" + '{"a":' * 5000 + "1" + "}" * 5000 + "</tool_call>"),
    (HERMES, '{"name": "add", "arguments": {"a": 1}}'),
    (HERMES, "<tool_call><tool_call> {"),
    (LLAMA, 'It is {"name": "add", "parameters": {"a": 1}}'),
    (LLAMA, '{"name": "Bob", "age": 3}'),
    (LLAMA, '{"name": "add", "parameters": '),
    (LLAMA, "<|python_tag|>print(1)"),
    (LLAMA, '\n;{"name": "add", "parameters": {"a": 1}}'),
    (LLAMA, ' [{"name": "add", "parameters": {"a": 1}}]'),
    (MISTRAL, "[TOOL_CALLS] none"),
    (MISTRAL, '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, 7]'),
    (MISTRAL, "[TOOL_CALLS][]"),
    (MISTRAL_NAMED, "[TOOL_CALLS]add[ARGS]7"),
    (MISTRAL_NAMED, "[TOOL_CALLS]add[AR"),
    (MISTRAL_NAMED, "[TOOL_CALLS]two words[ARGS]{}"),
]


@pytest.mark.parametrize(("form", "text", "plain", "calls"), CASES)
def test_calls_are_found(form: ToolFormat, text: str, plain: str, calls: list[ToolCall]) -> None:
    assert parse(form, text) == (plain, calls)
    assert parse(form, *text) == (plain, calls)


@pytest.mark.parametrize(("form", "text"), TEXTS)
def test_what_is_no_call_stays_text(form: ToolFormat, text: str) -> None:
    assert parse(form, text) == (text, [])
    assert parse(form, *text) == (text, [])


pieces = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
        *("{", "}", "[", "]", '"', "\\", " ", "\n", ";", "add", "text ", "1", ",", ":"),
        *('[{"name": "c", "parameters": {}}]', "{}", "add[ARGS]{}", "[TOOL_CALLS]add[ARGS]"),
        *('{"name": "add", "arguments": {"a": 1}}', '{"name": "b", "parameters": {}}'),
        *('"arguments": {', '"name": "add", ', '"a": "}"', '[{"name": "c", "arguments": {}}]'),
    ]
)
texts = st.lists(pieces, max_size=12).map("".join)


@settings(max_examples=400)
@given(st.sampled_from(list(FORMATS.values())), texts, st.data())
def test_cuts_change_nothing(form: ToolFormat, text: str, data: st.DataObject) -> None:
    whole = parse(form, text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(form, *parts) == whole == parse(form, *text)


@settings(max_examples=200)
@given(st.sampled_from(list(FORMATS.values())), texts)
def test_only_what_may_become_a_call_is_held_back(form: ToolFormat, text: str) -> None:
    parser, shown = ToolCallParser(form), ""
    for i, character in enumerate(text, 1):
        shown += parser.push(character)
        if parser.calls:
            return
        held = text[len(shown) : i]
        assert text.startswith(shown)
        bare = form.is_whole_answer and not shown and held.lstrip()[:1] in ("", "{")
        held = held.lstrip() if form.is_whole_answer and not shown else held
        assert bare or form.begin.startswith(held) or held.startswith(form.begin)


names = st.text("abcXYZ_09-", min_size=1, max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 999) | st.text(max_size=8),
    lambda part: (
        st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=5), part, max_size=3)
    ),
    max_leaves=6,
)
arguments = st.dictionaries(st.text(max_size=6), values, max_size=3)


def write(form: ToolFormat, calls: list[tuple[str, Any]], indent: int | None) -> str:
    """Calls as a model of the family writes them."""
    objects = [{"name": name, form.arguments_key: given} for name, given in calls]
    if form is MISTRAL:
        return form.begin + json.dumps(objects, indent=indent)
    if form is MISTRAL_NAMED:
        return "".join(
            f"{form.begin}{name}[ARGS]{json.dumps(given, indent=indent)}" for name, given in calls
        )
    dumped = [json.dumps(item, indent=indent, ensure_ascii=False) for item in objects]
    if form is LLAMA:
        return "; ".join(dumped)
    return "".join(f"{form.begin}\n{item}\n{form.end}" for item in dumped)


@settings(max_examples=200)
@given(
    st.sampled_from(list(FORMATS.values())),
    st.lists(st.tuples(names, arguments), min_size=1, max_size=3),
    st.sampled_from([None, 2]),
)
def test_every_written_call_is_read(
    form: ToolFormat, calls: list[tuple[str, Any]], indent: int | None
) -> None:
    text, found = parse(form, *write(form, calls, indent))
    assert text == ""
    assert [(call.name, json.loads(call.arguments_json)) for call in found] == calls
