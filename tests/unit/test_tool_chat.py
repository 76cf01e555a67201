"""Tools in a conversation: what templates tell, calls in answers, calls that are forced."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="the extra [grammar] is not installed")

from grammar_samples import EOS, SPECIAL, VOCAB
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_samples import ADD, HERMES_TEMPLATE, SAY, TEMPLATES, ChatTokenizer, make_runtime

from headrace.backends.fake import hashed_logits, scripted_logits
from headrace.runtime.chat.template import ChatTemplate
from headrace.runtime.chat.tool_calls import (
    ToolCall,
)
from headrace.runtime.errors import ConfigError, RequestError
from headrace.runtime.grammar.spec import Grammar

QUESTION = [{"role": "user", "content": "What is 1 and 2?"}]


def writer(text: str) -> Callable[[Sequence[int]], Any]:
    """Logits of a model that writes a text after any prompt, with its special token."""
    ids: list[int] = []
    for i, part in enumerate(text.split("[TOOL_CALLS]")):
        ids += [SPECIAL] * bool(i) + ChatTokenizer().encode_fragment(part)
    first: list[int] = []

    def script(prefix: Sequence[int]) -> int:
        if not first:
            first.append(len(prefix))
        at = len(prefix) - first[0]
        return ids[at] if at < len(ids) else EOS

    return scripted_logits(VOCAB, script)


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_template_tells_the_format(family: str) -> None:
    source, expected = TEMPLATES[family]
    assert ChatTemplate(source).tool_format == expected
    assert ChatTemplate(source).takes_tools is (family != "none")


ANSWERS = {
    "hermes": 'Yes. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "llama": '{"name": "add", "parameters": {"a": 1}}',
    "mistral": 'Yes. [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]',
    "mistral_named": 'Yes. [TOOL_CALLS]add[ARGS]{"a": 1}',
}


@pytest.mark.parametrize("family", ANSWERS)
def test_calls_come_apart_from_the_text(family: str) -> None:
    calls = (ToolCall("add", '{"a": 1}'),)
    text = "" if family == "llama" else "Yes. "
    with make_runtime(family, writer(ANSWERS[family])) as runtime:
        whole = runtime.chat(QUESTION, tools=[ADD])
        assert (whole.text, whole.tool_calls, whole.finish_reason) == (text, calls, "stop")
        deltas = list(runtime.chat(QUESTION, tools=[ADD], stream=True))
        assert "".join(delta.text for delta in deltas) == text
        assert [call for delta in deltas for call in delta.tool_calls] == list(calls)


def test_without_tools_nothing_is_a_call() -> None:
    with make_runtime("hermes", writer(ANSWERS["hermes"])) as runtime:
        for options in ({}, {"tools": [ADD], "tool_choice": "none"}):
            answer = runtime.chat(QUESTION, **options)
            assert (answer.text, answer.tool_calls) == (ANSWERS["hermes"], ())


def test_a_call_that_is_cut_off_stays_text() -> None:
    with make_runtime("hermes", writer(ANSWERS["hermes"])) as runtime:
        answer = runtime.chat(QUESTION, tools=[ADD], max_new_tokens=20)
        assert answer.text and ANSWERS["hermes"].startswith(answer.text)
        assert answer.tool_calls == () and answer.finish_reason == "length"
        stopped = runtime.chat(QUESTION, tools=[ADD], stop='"add"')
        assert stopped.text == 'Yes. <tool_call>\n{"name": ' and stopped.tool_calls == ()


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(sorted(ANSWERS)),
    st.sampled_from(["add", "say", "required"]),
    st.sampled_from([0.0, 0.8, 1.5]),
    st.integers(0, 2**32),
)
def test_a_forced_call_is_a_call(family: str, choice: str, temperature: float, seed: int) -> None:
    options: dict[str, Any] = {"temperature": temperature, "seed": seed}
    with make_runtime(family, hashed_logits(VOCAB)) as runtime:
        answer = runtime.chat(QUESTION, tools=[ADD, SAY], tool_choice=choice, **options)
    assert answer.text == "" and answer.finish_reason == "stop"
    (call,) = answer.tool_calls
    assert call.name == choice if choice != "required" else call.name in ("add", "say")
    arguments = json.loads(call.arguments_json)
    if call.name == "say":
        assert arguments.keys() == {"text"} and len(arguments["text"]) <= 5
    else:
        assert arguments["a"] in range(10) and set(arguments.get("b", ())) <= set(range(10))


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("hermes", {"tools": "add"}, "list"),
    ("hermes", {"tools": []}, "list"),
    ("hermes", {"tools": [{"name": "add"}]}, r"tools\[0\]"),
    ("hermes", {"tools": [ADD, ADD]}, "two functions"),
    ("hermes", {"tools": [{"function": {"name": "f", "parameters": 3}}]}, "parameters"),
    ("hermes", {"tools": [ADD], "tool_choice": "sub"}, "none, required, add"),
    ("hermes", {"tool_choice": "required"}, "needs tools"),
    ("other", {"tools": [ADD], "tool_choice": "add"}, "not known"),
    ("none", {"tools": [ADD]}, "no place"),
]


@pytest.mark.parametrize(("family", "options", "reason"), BAD)
def test_what_cannot_be_done_is_refused(family: str, options: dict[str, Any], reason: str) -> None:
    with make_runtime(family) as runtime, pytest.raises(RequestError, match=reason):
        runtime.chat(QUESTION, **options)


def test_a_grammar_beside_a_forced_call_is_refused() -> None:
    with make_runtime("hermes") as runtime, pytest.raises(ConfigError, match="tool_choice"):
        runtime.chat(QUESTION, tools=[ADD], tool_choice="add", grammar=Grammar.regex("a"))


def test_results_go_back_through_the_template() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    with make_runtime("hermes", writer("It is 3.")) as runtime:
        answer = runtime.chat(messages, tools=[ADD])
    assert answer.text == "It is 3."
    segments = ChatTemplate(HERMES_TEMPLATE).render(messages, tools=[ADD])
    text = "".join(part for part, _ in segments)
    assert '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' in text
