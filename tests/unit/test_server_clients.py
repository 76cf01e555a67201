"""Clients that leave, that do not read, that are too many; and the end of the server."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from server_samples import WAIT_S, GatedBackend, Serving, assert_error, fake_model, serving

from headrace.backends.fake import FakeBackend

PATH = "/v1/completions"
ENDLESS = {"model": "fake", "prompt": "a", "ignore_eos": True}


def until(condition: Callable[[], bool]) -> None:
    """Wait for what must become true."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def num_working(running: Serving) -> int:
    """Requests that are being worked on."""
    found = re.search(r"\nheadrace_requests_in_progress (\d+)", running.http.get("/metrics").text)
    assert found
    return int(found[1])


def is_idle(running: Serving) -> bool:
    return num_working(running) == 0


def raw_request(running: Serving, body: dict[str, Any], rcvbuf: int | None = None) -> socket.socket:
    """A connection on which the request was sent, and nothing was read."""
    data = json.dumps(body).encode()
    client = socket.socket()
    if rcvbuf is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
    client.settimeout(WAIT_S)
    client.connect(("127.0.0.1", int(running.url.rpartition(":")[2])))
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    client.sendall(head.encode() + data)
    return client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["prompt", "answer", "queue"])
def test_who_leaves_is_forgotten_within_a_step(stream: bool, phase: str) -> None:
    backend = GatedBackend(max_slots=1)
    loader = fake_model(backend, max_sequences=1, max_draft_tokens=0, max_chunk_tokens=8)
    with serving({"fake": loader}) as running:
        runtime = running.runtime("fake")
        body = {**ENDLESS, "prompt": "ab" * 40, "stream": stream}
        other = raw_request(running, {**ENDLESS, "max_tokens": 2}) if phase == "queue" else None
        if other is not None:
            until(lambda: backend.started == 1)
        client = raw_request(running, body)
        if phase == "queue":
            until(lambda: not is_idle(running))
            time.sleep(0.05)  # it is on its way to the queue; forgotten all the same if it is not
            backend.let_through(2)
            until(lambda: backend.started >= 3)
        elif phase == "answer":
            backend.let_through(15)
            until(lambda: backend.started == 16)
        else:
            until(lambda: backend.started == 1)
        client.close()
        if other is not None:
            other.close()
        until(lambda: is_idle(running))  # the server noticed; the engine is inside of a step
        started = backend.started
        backend.let_through(1)
        until(lambda: runtime.occupancy == (0, 0))
        assert backend.started == started
        backend.let_through(1000)


def test_who_does_not_read_is_dropped() -> None:
    backend = FakeBackend(max_slots=8, context_tokens=2000)
    with serving({"fake": fake_model(backend)}, max_buffer_bytes=65536) as running:
        body = {**ENDLESS, "n": 7, "logprobs": 20, "stream": True, "max_tokens": 1900}
        client = raw_request(running, body, rcvbuf=4096)
        until(lambda: not is_idle(running))
        answer = running.post(PATH, {**ENDLESS, "max_tokens": 5})
        assert answer.status_code == 200  # others are served meanwhile
        until(lambda: is_idle(running))
        data = b""
        try:
            while part := client.recv(1 << 20):
                data += part
        except ConnectionResetError:
            pass
        assert b"[DONE]" not in data
        assert running.runtime("fake").occupancy == (0, 0)
        until(lambda: len(running.server.server_state.connections) <= 1)


def test_too_many_are_told_to_come_back() -> None:
    backend = GatedBackend(max_slots=1)
    options: Any = {"max_sequences": 1, "max_waiting": 1}
    with serving({"fake": fake_model(backend, **options)}, max_requests=3) as running:
        clients = [raw_request(running, {**ENDLESS, "max_tokens": 2}) for _ in range(2)]
        until(lambda: running.runtime("fake")._worker._room == 0)
        # The queue is full: for whole answers as for streams.
        for stream in (False, True):
            answer = running.post(PATH, {**ENDLESS, "stream": stream})
            error = assert_error(answer, 429, "waiting already")
            assert error["code"] == "rate_limit_exceeded"
            assert int(answer.headers["retry-after"]) > 0
        backend.let_through(1000)
        for client in clients:
            assert b" 200 " in client.recv(100)
            client.close()


def test_too_many_at_once_never_reach_the_queue() -> None:
    backend = GatedBackend(max_slots=1)
    with serving({"fake": fake_model(backend)}, max_requests=2) as running:
        clients = [raw_request(running, {**ENDLESS, "max_tokens": 2}) for _ in range(2)]
        until(lambda: num_working(running) == 2)
        answer = running.post(PATH, {**ENDLESS})
        assert_error(answer, 429, "2 requests are being worked on")
        assert running.http.get("/health").status_code == 200
        backend.let_through(1000)
        for client in clients:
            assert b" 200 " in client.recv(100)
            client.close()


def test_the_end_waits_for_answers() -> None:
    backend = GatedBackend()
    running = Serving({"fake": fake_model(backend)}).wait()
    body = {**ENDLESS, "max_tokens": 40, "stream": True}
    backend.let_through(3)  # enough for a token that shows
    with httpx2.stream("POST", running.url + PATH, json=body, timeout=WAIT_S) as answer:
        lines = answer.iter_lines()
        next(lines)
        running.stop()
        until(lambda: not running.server.servers[0].is_serving())
        backend.let_through(1000)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{running.url}/health")
    running.close()


def test_the_deadline_ends_answers_with_an_error() -> None:
    backend = GatedBackend()
    running = Serving({"fake": fake_model(backend)}, drain_s=0.01).wait()
    body = {**ENDLESS, "stream": True}
    backend.let_through(3)  # enough for a token that shows
    with httpx2.stream("POST", running.url + PATH, json=body, timeout=WAIT_S) as answer:
        lines = answer.iter_lines()
        next(lines)
        whole = raw_request(running, ENDLESS)
        until(lambda: num_working(running) == 2)
        running.stop()
        until(lambda: running.models.status == "closed")
        backend.let_through(1)
        rest = [line for line in lines if line]
    assert rest[-2] == "event: error"
    error = json.loads(rest[-1].removeprefix("data: "))["error"]
    assert error["code"] == "model_unavailable"
    assert b" 503 " in whole.recv(100)
    whole.close()
    running.close()


def test_an_error_in_the_middle_is_an_event() -> None:
    with serving({"fake": fake_model(FakeBackend(fail_at=[3]))}) as running:
        answer = running.post(PATH, {**ENDLESS, "stream": True})
        assert answer.status_code == 200
        assert "event: error\ndata: " in answer.text and "[DONE]" not in answer.text
        error = json.loads(answer.text.rpartition("data: ")[2])["error"]
        assert error["type"] == "server_error" and "injected" not in error["message"]
        again = running.post(PATH, {**ENDLESS, "max_tokens": 3})
        assert again.status_code == 200


def test_an_error_before_the_first_token_is_a_status() -> None:
    with serving({"fake": fake_model(FakeBackend(fail_at=[0]))}) as running:
        answer = running.post(PATH, {**ENDLESS, "stream": True})
        assert_error(answer, 500, "its log says why")
