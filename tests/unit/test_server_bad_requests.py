"""Whatever a client sends: an error in OpenAI's shape that it can act on, never a 5xx."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from server_samples import JSON, WAIT_S, Serving, assert_error, fake_model, serving

from headrace.backends.fake import FakeBackend
from headrace.runtime.server import schema

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
PATHS = (CHAT, COMPLETE, "/v1/embeddings", "/tokenize", "/detokenize")
QUESTION = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def fields(kind: type[schema.Body]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with the keys of a body, and values that are as good as any."""
    return st.dictionaries(st.sampled_from(sorted(kind.model_fields)), JSON, max_size=6)


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    backend = FakeBackend(max_slots=16, context_tokens=64)
    with serving({"fake": fake_model(backend)}, max_body_bytes=100_000, max_tokens=4) as running:
        yield running


def check(server: Serving, path: str, body: Any) -> None:
    """What was sent is answered, or refused with a reason."""
    answer = server.post(path, body)
    if answer.status_code != 200:
        assert answer.status_code in (400, 404, 413)
        assert_error(answer, answer.status_code)


@settings(max_examples=60)
@given(path=st.sampled_from(PATHS), body=st.binary(max_size=60))
@example(path=CHAT, body=b"")
@example(path=CHAT, body=b"[" * 50_000)
@example(path=CHAT, body=b'{"messages":' * 1000)
@example(path=CHAT, body=b"\xff\xfe{}")
@example(path=CHAT, body=b'{"messages": [{"role": "user", "content": "\xff"}]}')
@example(path=CHAT, body=b'{"messages": [{"role": "user", "content": "\\ud800"}]}')
@example(path=COMPLETE, body=b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}")
@example(path=COMPLETE, body=b'{"prompt": "a", "temperature": NaN}')
@example(path=COMPLETE, body=b'{"prompt": "a", "temperature": 1e999}')
@example(path=COMPLETE, body=b'{"prompt": "a", "prompt": 5}')
@example(path=COMPLETE, body=b'{"prompt": "\\u0000"}')
def test_bytes(server: Serving, path: str, body: bytes) -> None:
    check(server, path, body)


@settings(max_examples=60)
@given(path=st.sampled_from(PATHS), body=JSON)
def test_any_json(server: Serving, path: str, body: Any) -> None:
    check(server, path, json.dumps(body).encode())


@settings(max_examples=120)
@given(body=fields(schema.ChatBody))
def test_chat_fields(server: Serving, body: dict[str, Any]) -> None:
    check(server, CHAT, json.dumps({**QUESTION, **body}).encode())


@settings(max_examples=120)
@given(body=fields(schema.CompletionBody))
def test_completion_fields(server: Serving, body: dict[str, Any]) -> None:
    check(server, COMPLETE, json.dumps({"prompt": "a", "max_tokens": 2, **body}).encode())


@settings(max_examples=60)
@given(message=fields(schema.Message), part=fields(schema.ContentPart))
def test_message_fields(server: Serving, message: dict[str, Any], part: dict[str, Any]) -> None:
    content = {"role": "user", "content": [part]}
    messages = [*QUESTION["messages"], message, content]  # type: ignore[misc]
    check(server, CHAT, json.dumps({**QUESTION, "messages": messages}).encode())


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (CHAT, {}, "messages", "required"),
        (CHAT, {"messages": "hi"}, "messages", "array"),
        (CHAT, {"messages": [{"content": "hi"}]}, "messages.0.role", "required"),
        (CHAT, {"messages": [{"role": "a b", "content": "hi"}]}, None, "role 'a b'"),
        (CHAT, {"messages": [{"role": "user"}]}, None, "no content"),
        (CHAT, {**QUESTION, "temperature": "hot"}, "temperature", "number"),
        (CHAT, {**QUESTION, "max_tokens": True}, "max_tokens", "integer"),
        (CHAT, {**QUESTION, "colour": 1}, "colour", "unrecognized request argument: colour"),
        (CHAT, {**QUESTION, "top_p": 2}, "top_p", "from 0 to 1"),
        (CHAT, {**QUESTION, "tool_choice": "required"}, None, "needs tools"),
        (CHAT, {**QUESTION, "seed": 2**64}, "seed", "less than"),
        (CHAT, {**QUESTION, "stop": ["a"] * 17}, "stop", "16"),
        (CHAT, {**QUESTION, "stop": "a" * 129}, "stop", "128"),
        (COMPLETE, {"prompt": ""}, None, "empty"),
        (COMPLETE, {"prompt": []}, None, "empty"),
        (COMPLETE, {"prompt": [1, 2, 64]}, None, "64"),
        (COMPLETE, {"prompt": [-1]}, None, "-1"),
        (COMPLETE, {"prompt": ["a"] * 100, "n": 2}, "n", "128"),
        (COMPLETE, {"prompt": "a", "echo": True}, "echo", "False"),
        (COMPLETE, {"prompt": "a", "suffix": "b"}, "suffix", "null"),
        (COMPLETE, {"prompt": "a", "repetition_penalty": 5e-324}, None, "infinite"),
        (COMPLETE, {"prompt": "a", "logit_bias": {"1": 1e300}}, None, "infinite"),
        (COMPLETE, {"prompt": "a", "logprobs": 21}, "top_logprobs", "from 0 to 20"),
        (COMPLETE, {"prompt": "a", "logit_bias": {"-1": 2}}, "logit_bias", "token id"),
        ("/v1/embeddings", {"input": "a"}, "model", "can make embeddings"),
        ("/detokenize", {"tokens": [64]}, "tokens", "64"),
        ("/tokenize", {"prompt": 4}, "prompt", "string"),
    ],
)
def test_what_is_wrong_is_named(
    server: Serving, path: str, body: dict[str, Any], param: str | None, words: str
) -> None:
    error = assert_error(server.post(path, body), 400, words)
    assert error["param"] == param


def test_parts_of_messages(server: Serving) -> None:
    def ask(*parts: dict[str, Any]) -> Any:
        body = {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 1}
        return server.post(CHAT, body)

    assert ask({"type": "text", "text": "hi"}).status_code == 200
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    assert assert_error(ask(image), 400, "only text")["param"] == "messages.0.content.0"


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nHost: localhost\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz",
    ],
)
def test_what_is_no_http(server: Serving, data: bytes) -> None:
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while part := client.recv(65536):
                answer += part
        except ConnectionResetError:
            pass
    assert b"Traceback" not in answer and b" 500 " not in answer
    assert server.http.get("/health").status_code == 200
