"""OpenAI's client and its responses, which say what a chat says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

pytest.importorskip("llguidance", reason="the extra [grammar] is not installed")

from server_samples import Serving, assert_error, package_model, serving

MESSAGES: Any = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello"},
]


@pytest.fixture(scope="module")
def server(tiny_package: Callable[..., Path]) -> Iterator[Serving]:
    with serving({"tiny": package_model(tiny_package("fp32"))}) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with server.client() as made:
        yield made


def test_a_response_says_what_a_chat_says(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=12)
    answer: Any = client.responses.create(
        model="tiny", input="hello", instructions="be brief", max_output_tokens=12
    )
    assert answer.output_text == chat.choices[0].message.content
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert chat.usage is not None and answer.usage.total_tokens == chat.usage.total_tokens
    same = client.responses.create(model="tiny", input=MESSAGES, max_output_tokens=12)
    assert same.output_text == answer.output_text
    parts: Any = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
    again = client.responses.create(model="tiny", input=MESSAGES[:1] + parts, max_output_tokens=12)
    assert again.output_text == answer.output_text
    # What came can be sent back.
    back: Any = [*MESSAGES, *[item.model_dump() for item in answer.output], MESSAGES[1]]
    assert client.responses.create(model="tiny", input=back, max_output_tokens=2).output


def test_a_streamed_response(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "input": "hello", "max_output_tokens": 12}
    whole = client.responses.create(**options)
    with client.responses.stream(**options) as stream:
        events = list(stream)
    final = events[-1].response  # type: ignore[union-attr]
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    ends = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds[-4:] == ends
    numbers = [event.sequence_number for event in events]
    assert numbers == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text == whole.output_text


def test_a_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False  # type: ignore[assignment]
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    answer = client.responses.create(model="tiny", input="hello", text=text)
    assert answer.status == "completed"
    assert answer.output_text.replace(" ", "") in ('{"a":true}', '{"a":false}')


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "only text"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"temperature": -1}, "temperature"),
        ({"max_output_tokens": 0}, "=0 is not valid"),
        ({"text": {"format": {"type": "json_schema"}}}, "schema"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused(server: Serving, wrong: Any, words: str, stream: bool) -> None:
    body = {"input": "hello", "stream": stream, **wrong}
    assert_error(server.post("/v1/responses", body), 400, words)
