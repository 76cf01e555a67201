"""`/openapi.json`: says everything that is served, and what it says is so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from engine_samples import LETTERS
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("jsonschema_rs", reason="schemathesis is not installed")

import jsonschema_rs
from server_samples import JSON, Serving, fake_model, serving

from headrace.backends.fake import FakeBackend
from headrace.runtime.server.page import page_routes

CHAT, COMPLETE, RESPOND = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TURN = {"role": "user", "content": "hi"}
MINIMAL: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [TURN], "max_tokens": 2},
    COMPLETE: {"prompt": "a", "max_tokens": 2},
    RESPOND: {"input": "hi", "max_output_tokens": 2},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1, 2]},
}
PENALTY = [-2.5, -2, 0, 2, 2.5, "1"]
SHARE = [-0.5, 0, 0.5, 1, 1.5, True]
SAMPLING: dict[str, list[Any]] = {
    "model": ["fake", 1],
    "user": ["me", 1],
    "metadata": [{"a": 1}, []],
    "max_tokens": [-1, 0, 1, 1.5, True, None],
    "temperature": [-0.5, 0, 7, "0"],
    "top_p": SHARE,
    "min_p": SHARE,
    "n": [0, 1, 3, 129],
    "stop": ["", "x", "x" * 128, "x" * 129, [], ["x"] * 16, ["x"] * 17, [""], [1]],
    "seed": [-(2**63) - 1, -(2**63), 2**64 - 1, 2**64],
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "logit_bias": [{}, {"3": 1.5}, {"-3": 1}, {"x": 1}, {"1" * 10: 1}, {"3": "1"}],
    "stream": [True, False, None, 1],
    "headrace": [{}, {"token_details": True}, {"other": 1}, None],
    "top_k": [-2, -1, 0, 5],
    "repetition_penalty": [-1, 0, 0.5, 3],
    "repeat_penalty": [-1, 0, 0.5, 3],
    "stop_token_ids": [[], [1], [-1], [1] * 256, [1] * 257],
    "ignore_eos": [True, 1],
    "colour": [1],
}
VALUES: dict[str, dict[str, list[Any]]] = {
    CHAT: {
        **SAMPLING,
        "messages": [
            [],
            "hi",
            [TURN, TURN],
            [{**TURN, "role": "a b"}],
            [{**TURN, "role": "x" * 64}],
            [{**TURN, "role": "x" * 65}],
            [{**TURN, "role": ""}],
            [{"content": "hi"}],
            [{**TURN, "content": [{"type": "text", "text": "hi"}]}],
            [{**TURN, "other": 1}],
        ],
        "max_completion_tokens": [0, 1],
        "logprobs": [True, False, 1],
        "tool_choice": ["none", "any"],
        "response_format": [{"type": "text"}, {"type": "xml"}],
    },
    COMPLETE: {
        **SAMPLING,
        "prompt": ["", "a", [], [1], [-1], [""], ["a"], [[]], [[1]], [[-1]], ["a", 1], 1, None],
        "logprobs": [-1, 0, 20, 21],
        "echo": [False, True, 0],
        "best_of": [1, 2, True],
    },
    RESPOND: {
        "input": ["hi", [], [TURN], [{**TURN, "role": "tool"}]],
        "max_output_tokens": [0, 1],
        "top_p": SHARE,
        "truncation": ["disabled", "auto"],
    },
    "/tokenize": {"prompt": ["", "a", 1], "other": [1]},
    "/detokenize": {"tokens": [[], [1], [-1], ["a"], 1]},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving({"fake": fake_model(FakeBackend(max_slots=16))}, max_tokens=4) as running:
        yield running


@pytest.fixture(scope="module")
def description(server: Serving) -> dict[str, Any]:
    answer = server.http.get("/openapi.json")
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def checker(description: dict[str, Any], schema: dict[str, Any]) -> Any:
    return jsonschema_rs.validator_for({**schema, "components": description["components"]})


def body_schema(description: dict[str, Any], path: str) -> Any:
    content = description["paths"][path]["post"]["requestBody"]["content"]
    return checker(description, content["application/json"]["schema"])


def resolved(description: dict[str, Any], response: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in response:
        return response
    found: dict[str, Any] = description["components"]["responses"]
    return found[response["$ref"].rpartition("/")[2]]  # type: ignore[no-any-return]


def check_answer(description: dict[str, Any], method: str, path: str, answer: Any) -> None:
    """It has a status that is described, and looks as this is described."""
    responses = description["paths"][path][method]["responses"]
    content = resolved(description, responses[str(answer.status_code)])["content"]
    schema = content[answer.headers["content-type"].partition(";")[0]]["schema"]
    if "properties" not in schema:
        checker(description, schema).validate(answer.json())
        return
    events = [line.removeprefix("data: ") for line in answer.text.split("\n") if "data: " in line]
    assert events
    json_text, end = schema["properties"]["data"]["anyOf"]
    assert end == {"const": "[DONE]"}
    check = checker(description, json_text["contentSchema"])
    for event in events:
        if event != "[DONE]":
            check.validate(json.loads(event))


def test_every_route_is_described(server: Serving, description: dict[str, Any]) -> None:
    app: Any = server.server.config.app
    page = {route.path for route in page_routes()}
    served = {(route.path, "post" if "POST" in route.methods else "get") for route in app.routes}
    told = {(path, method) for path, kinds in description["paths"].items() for method in kinds}
    assert told == {pair for pair in served if pair[0] not in page}
    for path, kinds in description["paths"].items():
        for method, operation in kinds.items():
            assert operation["summary"] and set(operation["responses"]) > {"200", "403", "500"}
            assert ("requestBody" in operation) == (method == "post"), path
    # Everything that is referred to is there.
    text = json.dumps(description)
    for part in ("schemas", "responses"):
        for name in description["components"][part]:
            assert f"#/components/{part}/{name}" in text


def test_without_a_key_nothing_asks_for_one(description: dict[str, Any]) -> None:
    assert "security" not in json.dumps(description)
    assert "2097152 bytes" in description["components"]["responses"]["413"]["description"]


def test_with_a_key() -> None:
    with serving({"fake": fake_model()}, api_key="k", max_body_bytes=5000) as running:
        assert running.http.get("/openapi.json").status_code == 401
        headers = {"Authorization": "Bearer k"}
        found = running.http.get("/openapi.json", headers=headers).json()
        assert "5000 bytes" in found["components"]["responses"]["413"]["description"]
        for path, kinds in found["paths"].items():
            for method, operation in kinds.items():
                needs_key = operation.get("security") == [{"key": []}]
                assert needs_key == ("401" in operation["responses"])
                answer = running.http.request(method, path)
                assert (answer.status_code == 401) == needs_key, path


@pytest.mark.parametrize("path", VALUES)
def test_the_schema_and_the_server_agree(
    server: Serving, description: dict[str, Any], path: str
) -> None:
    schema = body_schema(description, path)
    for name, values in VALUES[path].items():
        for value in values:
            body = {**MINIMAL[path], name: value}
            answer = server.post(path, body)
            assert (answer.status_code == 200) == schema.is_valid(body), (name, value, answer.text)
            assert answer.status_code in (200, 400)
            check_answer(description, "post", path, answer)
    for name in {"messages", "prompt", "input", "tokens"} & MINIMAL[path].keys():
        body = {key: value for key, value in MINIMAL[path].items() if key != name}
        assert not schema.is_valid(body) and server.post(path, body).status_code == 400


@settings(max_examples=60)
@given(data=st.data())
def test_what_the_schema_refuses_is_refused(
    server: Serving, description: dict[str, Any], data: st.DataObject
) -> None:
    path = data.draw(st.sampled_from([*VALUES, "/v1/embeddings"]))
    content = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    name = content["schema"]["$ref"].rpartition("/")[2]
    keys = sorted(description["components"]["schemas"][name]["properties"])
    more = data.draw(st.dictionaries(st.sampled_from(keys), JSON, max_size=4))
    text = json.dumps({**MINIMAL.get(path, {}), **more})
    if not body_schema(description, path).is_valid(json.loads(text)):
        assert server.post(path, text.encode()).status_code in (400, 404)


def test_answers_look_as_described(server: Serving, description: dict[str, Any]) -> None:
    details = {"headrace": {"token_details": True}, "n": 2}
    options: dict[str, dict[str, Any]] = {
        CHAT: {**details, "logprobs": True, "top_logprobs": 2},
        COMPLETE: {**details, "logprobs": 2, "prompt": [LETTERS[1:4], LETTERS[2:5]]},
        RESPOND: {"instructions": "be brief"},
    }
    for path, more in options.items():
        body = {**MINIMAL[path], **more}
        check_answer(description, "post", path, server.post(path, body))
        streamed: dict[str, Any] = {**body, "stream": True}
        if path != RESPOND:
            streamed["stream_options"] = {"include_usage": True}
        check_answer(description, "post", path, server.post(path, streamed))
        gone = {**body, "model": "none"}
        check_answer(description, "post", path, server.post(path, gone))
    for path in ("/health", "/lanes", "/v1/models", "/openapi.json"):
        check_answer(description, "get", path, server.http.get(path))
    check_answer(description, "get", "/v1/models/{name}", server.http.get("/v1/models/fake"))
    check_answer(description, "get", "/v1/models/{name}", server.http.get("/v1/models/none"))
    assert server.http.get("/lanes?after=x").status_code == 400
    assert server.http.get("/metrics").headers["content-type"] in json.dumps(
        list(description["paths"]["/metrics"]["get"]["responses"]["200"]["content"])
    )
