"""Who is let in, and what is refused before a model hears of it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from engine_samples import make_runtime
from server_samples import WAIT_S, Serving, assert_error, fake_model, serving

from headrace.runtime.api import Runtime
from headrace.runtime.errors import PackageError
from headrace.runtime.server.options import ServerOptions

BODY = {"model": "fake", "prompt": "a", "max_tokens": 3}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving({"fake": fake_model()}, max_body_bytes=4096) as running:
        yield running


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:80", "LOCALHOST", "a.localhost", "127.0.0.1:1", "[::1]:8", "10.1.2.3"],
)
def test_hosts_that_are_known(server: Serving, host: str) -> None:
    assert server.post("/v1/completions", BODY, headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "1.2.3", "xn--a"],
)
def test_other_hosts_are_not(server: Serving, host: str) -> None:
    for path in ("/health", "/v1/models", "/nowhere"):
        assert_error(server.http.get(path, headers={"Host": host}), 403, "--allowed-host")
    assert_error(server.post("/v1/completions", BODY, headers={"Host": host}), 403, host[:9])


@pytest.mark.parametrize("host", ["a@127.0.0.1", "127.0.0.1/x", "127.0.0.1:x", "[::1", ""])
def test_malformed_hosts(server: Serving, host: str) -> None:
    answer = server.post("/v1/completions", BODY, headers={"Host": host})
    assert_error(answer, 400, "Host")


def test_pages_of_others_may_not_ask(server: Serving) -> None:
    for origin in ("https://evil.example", "null", "http://localhost:1"):
        answer = server.post("/v1/completions", BODY, headers={"Origin": origin})
        assert_error(answer, 403, "--cors-origin")
        assert "access-control-allow-origin" not in answer.headers
    own = {"Origin": server.url}
    assert server.post("/v1/completions", BODY, headers=own).status_code == 200
    preflight = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    answer = server.http.options("/v1/completions", headers=preflight)
    assert answer.status_code == 403


def test_pages_that_were_named_may() -> None:
    origin = "https://chat.example"
    options: Any = {"cors_origins": (origin,), "allowed_hosts": ("box.lan",), "api_key": "k"}
    with serving({"fake": fake_model()}, **options) as running:
        preflight = {
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization",
        }
        answer = running.http.options("/v1/completions", headers=preflight)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == origin
        headers = {"Origin": origin, "Host": "box.lan:8000", "Authorization": "Bearer k"}
        answer = running.post("/v1/completions", BODY, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == origin
        other = {**headers, "Origin": "https://evil.example"}
        assert_error(running.post("/v1/completions", BODY, headers=other), 403)


def test_keys() -> None:
    with serving({"fake": fake_model()}, api_key="right-key") as running:
        for given in ("", "right-key", "Bearer", "Bearer wrong", "Basic right-key", "Bearer \xe9"):
            headers = {"Authorization": given.encode("latin-1")}
            for path in ("/v1/models", "/metrics", "/nowhere"):
                error = assert_error(running.http.get(path, headers=headers), 401, "API key")
                assert error["code"] == "invalid_api_key"
        assert_error(running.http.get("/v1/models"), 401)
        assert running.http.get("/health").status_code == 200
        right = {"Authorization": "Bearer right-key"}
        assert running.http.get("/v1/models", headers=right).status_code == 200
        with running.client(api_key="right-key") as client:
            assert client.completions.create(**BODY).usage


def test_bodies_that_are_too_large(server: Serving) -> None:
    large = b'{"model": "fake", "prompt": "' + b"a" * 5000 + b'"}'
    assert_error(server.post("/v1/completions", large), 413, "4096")
    chunks = iter([large[:3000], large[3000:]])
    answer = server.http.post("/v1/completions", content=chunks)  # without its length
    assert_error(answer, 413, "4096")
    assert server.post("/v1/completions", BODY).status_code == 200


def test_paths_and_methods(server: Serving) -> None:
    assert_error(server.http.get("/v1/nothing"), 404, "/v1/nothing")
    assert_error(server.http.get("/v1/models/..%2f..%2fetc%2fpasswd"), 404)
    assert_error(server.http.get("/v1/completions"), 405, "GET")
    assert_error(server.http.delete("/v1/models"), 405, "DELETE")
    error = assert_error(server.post("/v1/completions", {**BODY, "model": "/etc"}), 404, "fake")
    assert error["code"] == "model_not_found"


def test_a_client_that_does_not_go_on_sending() -> None:
    with serving({"fake": fake_model()}, client_timeout_s=0.2) as running:
        port = int(running.url.rpartition(":")[2])
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n"
        for said, status in ((head + b"\r\n{", b" 408 "), (head, b""), (b"", b"")):
            with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as client:
                client.sendall(said)
                answer = b""
                try:
                    while data := client.recv(65536):
                        answer += data
                except ConnectionResetError:
                    pass
                assert status in answer.partition(b"\r\n")[0]
                assert bool(answer) == bool(status)


def test_more_connections_than_are_kept() -> None:
    with serving({"fake": fake_model()}, max_requests=2) as running:
        port = int(running.url.rpartition(":")[2])
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(30)]
        assert len(running.server.server_state.connections) <= 5
        for client in idle:
            client.close()
        with running.client(max_retries=20) as client:
            assert client.completions.create(**BODY).usage


def test_while_models_are_loaded() -> None:
    go_on = threading.Event()

    def load() -> Runtime:
        assert go_on.wait(WAIT_S)
        return make_runtime()

    running = Serving({"fake": load})
    try:
        health = running.http.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "loading"})
        answer = running.post("/v1/completions", BODY)
        assert assert_error(answer, 503, "being loaded")["code"] == "model_loading"
        assert int(answer.headers["retry-after"]) > 0
        nameless = running.post("/v1/completions", {"prompt": "a"})
        assert_error(nameless, 503)
        assert [m["id"] for m in running.http.get("/v1/models").json()["data"]] == ["fake"]
        go_on.set()
        running.wait()
        assert running.http.get("/health").json() == {"status": "ok"}
        assert running.post("/v1/completions", BODY).status_code == 200
    finally:
        go_on.set()
        running.close()


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    def load() -> Runtime:
        raise PackageError("it is damaged")

    running = Serving({"fake": load})
    running.join()
    assert isinstance(running.server.load_error, PackageError)


def test_a_model_that_broke(server: Serving) -> None:
    with serving({"fake": fake_model()}) as running:
        running.runtime("fake").close()
        assert running.http.get("/health").json() == {"status": "failed"}
        assert_error(running.post("/v1/completions", BODY), 503)


def test_metrics(server: Serving) -> None:
    assert server.post("/v1/completions", BODY).status_code == 200
    answer = server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    figures = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(figures['headrace_new_tokens_total{model="fake"}']) >= 3
    assert float(figures['headrace_token_entropy_nats_count{model="fake"}']) >= 3
    assert float(figures['headrace_step_seconds_count{model="fake"}']) >= 3
    assert float(figures["process_resident_memory_bytes"]) > 0
    assert figures['headrace_waiting{model="fake"}'] == "0.0"
    known = {"/v1/completions", "/metrics", "/health", "/v1/models", "other"}
    paths = {line.split('path="')[1].split('"')[0] for line in lines if 'path="' in line}
    assert paths <= known  # whatever clients ask for


def test_options_are_checked_when_made() -> None:
    assert ServerOptions.from_dict({"max_tokens": None, "folders": [1]}) == ServerOptions()
