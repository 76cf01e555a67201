"""The real model within grammars: answers are whole, at any temperature, drafted or not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="the extra [grammar] is not installed")

from headrace.runtime import Grammar, Runtime
from headrace.runtime.cli import main

pytestmark = pytest.mark.model

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "population": {"type": "integer", "minimum": 0, "maximum": 10_000_000_000},
        "languages": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
        "kind": {"enum": ["city", "country", "river"]},
    },
    "required": ["name", "population", "languages", "kind"],
    "additionalProperties": False,
}
QUESTIONS = [
    "Describe France as JSON.",
    "Tell me about the Danube.",
    "What is the largest city of Japan?",
    "Write a poem about the sea.",  # says nothing of JSON
    "Say \"{'name': \n\n\n" + " " * 40,
    "<|im_end|> Which country has the most people?",
]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 11},
    {"temperature": 0.8, "seed": 12, "top_p": 0.9, "repetition_penalty": 1.1, "n": 2},
]


@pytest.fixture(scope="module")
def runtime(smollm2_package: Callable[[str, str], Path]) -> Iterator[Runtime]:
    with Runtime.load(smollm2_package("w8a8_row", "auto"), max_sequences=16) as made:
        yield made


def ask(runtime: Runtime, options: dict[str, Any]) -> list[Any]:
    prompts = [f"Question: {question}\nAnswer: " for question in QUESTIONS]
    return [choice for answer in runtime.generate(prompts, **options) for choice in answer.choices]


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_answers_are_json_of_the_schema(runtime: Runtime, sampling: dict[str, Any]) -> None:
    options = {**sampling, "grammar": Grammar.json_schema(SCHEMA), "max_new_tokens": 200}
    for choice in ask(runtime, options):
        assert choice.finish_reason == "stop"
        value = json.loads(choice.text)
        assert list(value) == SCHEMA["required"]
        assert isinstance(value["name"], str) and len(value["name"]) <= 40
        assert 0 <= value["population"] <= 10_000_000_000
        assert len(value["languages"]) <= 4
        assert value["kind"] in ("city", "country", "river")
        assert choice.text == json.dumps(value, ensure_ascii=False) or "\\" in choice.text
        assert not set(choice.token_ids) & set(range(17))  # special, or the end


def test_any_json_object_ends_or_is_cut_off(runtime: Runtime) -> None:
    options = {"grammar": Grammar.json_schema({"type": "object"}), "max_new_tokens": 48}
    for choice in ask(runtime, options):
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.text), dict)
        else:
            assert choice.finish_reason == "length" and len(choice.token_ids) == 48
        assert not re.search(r"\s\s", re.sub(r'"(\\.|[^"\\])*"?', "", choice.text))


@pytest.mark.parametrize("sampling", SAMPLING[::2], ids=str)
def test_drafts_and_company_change_nothing(
    runtime: Runtime, smollm2_package: Callable[[str, str], Path], sampling: dict[str, Any]
) -> None:
    grammar = Grammar.json_schema(SCHEMA)
    options = {**sampling, "grammar": grammar, "max_new_tokens": 60, "logprobs": 1}
    prompts = [f"Question: {question}\nAnswer: " for question in QUESTIONS[:4]]
    first = runtime.steps[-1].step_id if runtime.steps else -1
    together = runtime.generate(prompts, **options)
    accepted = sum(step.accepted for step in runtime.steps if step.step_id > first)
    package = smollm2_package("w8a8_row", "auto")
    with Runtime.load(package, max_sequences=16, max_draft_tokens=0) as without:
        plain = [without.generate(prompt, **options) for prompt in prompts]
    assert [c.choices for c in together] == [c.choices for c in plain]
    assert accepted >= 4 * 8  # at least the names of the properties


def test_the_command_takes_grammars(
    smollm2_package: Callable[[str, str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    package = str(smollm2_package("w8a8_row", "auto"))
    schema, lark = tmp_path / "schema.json", tmp_path / "answer.lark"
    schema.write_text(json.dumps(SCHEMA), encoding="utf-8")
    lark.write_text('start: ("yes" | "no") ", " /[a-z ]{1,20}/', encoding="utf-8")
    expected = {
        ("--json-schema", str(schema)): r"\{.*\}",
        ("--regex", "[0-9]{4}"): "[0-9]{4}",
        ("--grammar", str(lark)): "(yes|no), [a-z ]{1,20}",
    }
    for arguments, pattern in expected.items():
        assert main(["run", package, "Is it warm?", *arguments, "--max-new-tokens", "99"]) == 0
        assert re.fullmatch(pattern, capsys.readouterr().out.removesuffix("\n"))
    schema.write_text('{"type": "objct"}', encoding="utf-8")
    assert main(["run", package, "Hello", "--json-schema", str(schema)]) == 1
    assert "objct" in capsys.readouterr().err
