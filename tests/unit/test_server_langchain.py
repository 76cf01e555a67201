"""What LangChain's `ChatOpenAI` sends (recorded of langchain-openai 1.8.1), and needs back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="the extra [grammar] is not installed")

from server_samples import Serving, serving
from tool_samples import make_runtime, writer

PATH = "/v1/chat/completions"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
INTEGERS = {"items": {"type": "integer"}, "type": "array"}
PARAMETERS = {
    "properties": {"a": {"type": "integer"}, "b": INTEGERS},
    "required": ["a", "b"],
    "type": "object",
}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
ASK = [{"content": "hello", "role": "user"}]
# A class of pydantic, with an optional field, as OpenAI's library writes it.
PAIR = {
    "description": "Two.",
    "properties": {
        "a": {"enum": ["x", "yy"], "title": "A", "type": "string"},
        "b": {"title": "B", "type": "boolean"},
        "c": {"anyOf": [{"type": "boolean"}, {"type": "null"}], "title": "C"},
    },
    "required": ["a", "b", "c"],
    "title": "Pair",
    "type": "object",
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    loaders = {
        "free": lambda: make_runtime("hermes"),
        "caller": lambda: make_runtime("hermes", writer(f"Well. {CALL}{CALL}")),
    }
    with serving(loaders) as running:
        yield running


def ask(server: Serving, model: str, **body: Any) -> dict[str, Any]:
    """The first choice's message."""
    answer = server.post(PATH, {"model": model, "stream": False, "messages": ASK, **body})
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


def arguments(call: dict[str, Any]) -> Any:
    return json.loads(call["function"]["arguments"])


def test_results_of_tools_go_back(server: Serving) -> None:
    """`bind_tools`, twice: it repeats the calls without `refusal`, and content before the role."""
    said = ask(server, "caller", tools=[TOOL])
    calls = said["tool_calls"]
    assert [arguments(call) for call in calls] == [{"a": 1, "b": [2]}] * 2
    repeated = [
        {"type": "function", "id": call["id"], "function": call["function"]} for call in calls
    ]
    results = [{"content": "3", "role": "tool", "tool_call_id": call["id"]} for call in calls]
    turns = [
        *ASK,
        {"content": said["content"], "role": "assistant", "tool_calls": repeated},
        *results,
    ]
    assert ask(server, "free", messages=turns, max_completion_tokens=4, tools=[TOOL])["content"]


def test_a_strict_tool_of_which_one_call_is_wanted(server: Serving) -> None:
    strict = {**FUNCTION, "parameters": {**PARAMETERS, "additionalProperties": False}}
    tools = [{"type": "function", "function": {**strict, "strict": True}}]
    said = ask(server, "caller", parallel_tool_calls=False, tools=tools)
    assert len(said["tool_calls"]) == 1


def test_a_class_as_a_tool(server: Serving) -> None:
    """`with_structured_output(method="function_calling")`."""
    optional = {"anyOf": [{"type": "boolean"}, {"type": "null"}], "default": None}
    properties = {"a": {"enum": ["x", "yy"], "type": "string"}, "c": optional}
    pair = {
        "name": "Pair",
        "description": "Two.",
        "parameters": {"properties": properties, "required": ["a"], "type": "object"},
    }
    said = ask(
        server,
        "free",
        max_completion_tokens=900,
        parallel_tool_calls=False,
        seed=5,
        temperature=1.0,
        tool_choice={"type": "function", "function": {"name": "Pair"}},
        tools=[{"type": "function", "function": pair}],
    )
    (call,) = said["tool_calls"]
    assert call["function"]["name"] == "Pair" and arguments(call)["a"] in ("x", "yy")


@pytest.mark.parametrize("tools", [{}, {"tools": [TOOL]}])
def test_a_class_as_the_form_of_an_answer(server: Serving, tools: dict[str, Any]) -> None:
    """`with_structured_output(method="json_schema")`, also beside tools."""
    form = {"schema": PAIR, "name": "Pair", "strict": True}
    said = ask(
        server,
        "free",
        max_completion_tokens=900,
        response_format={"type": "json_schema", "json_schema": form},
        seed=5,
        temperature=1.0,
        **tools,
    )
    found = json.loads(said["content"])
    assert found["a"] in ("x", "yy") and found["b"] in (True, False)
    assert found["c"] in (True, False, None) and len(found) == 3


def test_everything_else_that_it_can_be_told(server: Serving) -> None:
    options = {
        "service_tier": "auto",
        "logit_bias": {"5": 1},
        "max_completion_tokens": 4,
        "reasoning_effort": "low",
        "store": False,
        "verbosity": "low",
        "metadata": {"a": "b"},
        "min_p": 0.1,
        "top_k": 3,
    }
    named = [
        {"content": [{"type": "text", "text": "x"}], "name": "bob", "role": "user"},
        {"content": "y", "role": "assistant"},
        {"content": "q", "role": "system"},
        *ASK,
    ]
    assert ask(server, "free", messages=named, **options)["content"]
