"""Tools that a request offers, and the grammar of a call that it forces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.runtime.chat.tool_calls import ToolFormat
from headrace.runtime.errors import RequestError
from headrace.runtime.grammar.spec import Grammar

Tools = Sequence[Mapping[str, Any]]
CHOICES = ("auto", "none", "required")


def function_names(tools: object) -> list[str]:
    """Names of the functions, in order.

    Raises:
        RequestError: this is no list of `{"type": "function", "function": {"name": ...}}`.
    """
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence) or not tools:
        raise RequestError("tools must be a list of {'type': 'function', 'function': {...}}")
    names: list[str] = []
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise RequestError(f"tools[{i}] has no function with a name")
        if not isinstance(function.get("parameters", {}), Mapping):
            raise RequestError(f"tools[{i}]: parameters must be a JSON schema, which is an object")
        if name in names:
            raise RequestError(f"tools[{i}]: there are two functions called {name}")
        names.append(name)
    return names


def call_grammar(tools: Tools, choice: str, form: ToolFormat) -> Grammar:
    """What follows `form.opening` where a call must be written.

    Args:
        tools: checked by `function_names`.
        choice: "required", or the name of the function to call.

    Raises:
        RequestError: there is no such function.
        ConfigError: the schemas are too large.
    """
    functions = [tool["function"] for tool in tools]
    chosen = [f for f in functions if choice in ("required", f["name"])]
    if not chosen:
        known = ", ".join([*CHOICES, *(f["name"] for f in functions)])
        raise RequestError(f"tool_choice={choice!r} is not valid: expected one of {known}")
    root = "#/items" if form.is_list else "#"
    if len(chosen) == 1:
        schema = _call_schema(chosen[0], form.arguments_key, root)
    else:
        options = [
            _call_schema(function, form.arguments_key, f"{root}/anyOf/{i}")
            for i, function in enumerate(chosen)
        ]
        schema = {"anyOf": options}
    if form.is_list:
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
    return Grammar.json_schema(schema)


def _call_schema(function: Mapping[str, Any], key: str, place: str) -> dict[str, Any]:
    """Schema of a call; `place` is where it will stand."""
    parameters = _moved(function.get("parameters") or {}, f"{place}/properties/{key}")
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            key: {**parameters, "type": "object"},
        },
        "required": ["name", key],
        "additionalProperties": False,
    }


def _moved(value: Any, place: str) -> Any:
    """A copy of a schema whose references to its own root point to `place`."""
    if isinstance(value, Mapping):
        return {
            k: place + v[1:]
            if k == "$ref" and isinstance(v, str) and v.startswith("#")
            else _moved(v, place)
            for k, v in value.items()
        }
    return [_moved(item, place) for item in value] if isinstance(value, (list, tuple)) else value
