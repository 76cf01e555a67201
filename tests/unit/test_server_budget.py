"""A server whose models take turns in a budget of memory, as clients see it."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
from engine_samples import make_runtime, speller
from server_samples import WAIT_S, GatedBackend, Serving, assert_error, fake_model, serving
from test_server_clients import is_idle, num_working, raw_request, until

from headrace.backends.fake import FakeBackend
from headrace.runtime.api import Runtime
from headrace.runtime.errors import PackageError
from headrace.runtime.server.residents import Loader, Served

PATH = "/v1/completions"
WORDS = {"a": "alphabetical", "b": "betatests"}


def one_at_a_time(*changed: Loader) -> dict[str, Any]:
    """Models `a` and `b`, and room for either; `changed` are other loaders of the first of them."""
    loaders = [*changed, *(writes(name) for name in "ab"[len(changed) :])]
    served = {name: Served(load, need_bytes=6) for name, load in zip("ab", loaders, strict=True)}
    return {"served": served, "budget_bytes": 10}


def writes(name: str) -> Loader:
    """A model that answers with its word."""
    return lambda: make_runtime(speller(WORDS[name]))


def ask(running: Serving, model: str, stream: bool = False) -> str:
    """The text of an answer."""
    answer = running.post(PATH, {"model": model, "prompt": "x", "stream": stream})
    assert answer.status_code == 200, answer.text
    if not stream:
        text = answer.json()["choices"][0]["text"]
        assert isinstance(text, str)
        return text
    events = re.findall(r"data: (\{.*\})", answer.text)
    assert answer.text.endswith("data: [DONE]\n\n")
    return "".join(c["text"] for event in events for c in json.loads(event)["choices"])


def figure(running: Serving, name: str) -> float:
    """One of those at /metrics."""
    found = re.search(rf"^{re.escape(name)} (\S+)$", running.http.get("/metrics").text, re.M)
    assert found, name
    return float(found[1])


class Gate:
    """A loader that waits until it is opened."""

    def __init__(self, load: Loader) -> None:
        self._load = load
        self.open, self.asked = threading.Event(), threading.Event()

    def __call__(self) -> Any:
        self.asked.set()
        assert self.open.wait(WAIT_S)
        return self._load()


def test_requests_alternate() -> None:
    with serving(**one_at_a_time()) as running:
        for turn in range(6):
            model = "ab"[turn % 2]
            assert ask(running, model, stream=turn % 3 == 0) == WORDS[model]
            assert list(running.models.loaded) == [model]
        for model in "ab":
            assert figure(running, f'headrace_model_loads{{model="{model}"}}') == 3
            assert figure(running, f'headrace_model_loaded{{model="{model}"}}') == (model == "b")
        listed = running.http.get("/v1/models").json()["data"]
        assert [model["id"] for model in listed] == ["a", "b"]


def test_many_at_once_are_answered_as_alone() -> None:
    with serving(**one_at_a_time()) as running, ThreadPoolExecutor(12) as pool:
        jobs = [("ab"[i * i % 3 % 2], i % 4 == 0) for i in range(60)]
        found = list(pool.map(lambda job: ask(running, *job), jobs))
        assert found == [WORDS[model] for model, _ in jobs]
        until(lambda: is_idle(running))
        assert [one.num_leases for one in running.models._residents._all.values()] == [0, 0]


def test_a_load_for_all_who_wait_and_health_meanwhile() -> None:
    gate = Gate(writes("b"))
    with serving(**one_at_a_time(writes("a"), gate)) as running, ThreadPoolExecutor(8) as pool:
        found = [pool.submit(ask, running, "b") for _ in range(8)]
        until(lambda: num_working(running) == 8)
        assert gate.asked.wait(WAIT_S)
        assert running.http.get("/health").json() == {"status": "ok"}
        lanes = running.http.get("/lanes", params={"model": "b"}).json()
        assert (lanes["model"], lanes["models"]) == ("b", ["a", "b"]) and "steps" not in lanes
        gate.open.set()
        assert [one.result() for one in found] == [WORDS["b"]] * 8
        assert running.models.num_loads("b") == 1


def test_a_stream_keeps_its_model() -> None:
    backend = GatedBackend(max_slots=16)
    with serving(**one_at_a_time(fake_model(backend))) as running, ThreadPoolExecutor(1) as pool:
        backend.let_through(3)
        body = {"model": "a", "prompt": "a", "ignore_eos": True, "max_tokens": 40, "stream": True}
        with httpx2.stream("POST", running.url + PATH, json=body, timeout=WAIT_S) as answer:
            lines = answer.iter_lines()
            next(lines)
            other = pool.submit(ask, running, "b")
            until(lambda: num_working(running) == 2)
            assert list(running.models.loaded) == ["a"] and not other.done()
            backend.let_through(1000)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
        assert other.result() == WORDS["b"]


def test_who_waits_too_long_is_told() -> None:
    backend = GatedBackend(max_slots=16)
    options = one_at_a_time(fake_model(backend))
    with serving(**options, wait_s=0.05) as running, ThreadPoolExecutor(1) as pool:
        body = {"model": "a", "prompt": "a", "max_tokens": 2}
        first = pool.submit(running.post, PATH, body)
        until(lambda: backend.started == 1)
        answer = running.post(PATH, {"model": "b", "prompt": "x"})
        error = assert_error(answer, 503, "b could not be had", "other models are in use")
        assert error["code"] == "model_unavailable" and int(answer.headers["retry-after"]) > 0
        backend.let_through(1000)
        assert first.result().status_code == 200
        assert ask(running, "b") == WORDS["b"]


def left_while(phase: str, stream: bool) -> None:
    """A client leaves, and its model can be unloaded."""
    backend = GatedBackend(max_slots=16)
    gate = Gate(writes("b"))
    backends = iter([backend, speller(WORDS["a"])])
    loaders = (lambda: make_runtime(next(backends)), gate)
    with serving(**one_at_a_time(*loaders)) as running:
        body = {"model": "a", "prompt": "a", "ignore_eos": True, "stream": stream}
        client = raw_request(running, body)
        until(lambda: backend.started == 1)
        if phase == "answer":
            backend.let_through(15)
            until(lambda: backend.started == 16)
        if phase in ("waiting", "loading"):
            waiting = raw_request(running, {**body, "model": "b"})
            until(lambda: num_working(running) == 2)
            if phase == "loading":
                client.close()
                backend.let_through(1000)
                assert gate.asked.wait(WAIT_S)
            waiting.close()
            until(lambda: num_working(running) == (phase == "waiting"))
        client.close()
        backend.let_through(1000)
        gate.open.set()
        until(lambda: is_idle(running))
        for model in "ba":
            assert ask(running, model)
            assert list(running.models.loaded) == [model]


def test_who_leaves_lets_go() -> None:
    for stream in (False, True):
        for phase in ("prompt", "answer", "waiting", "loading"):
            left_while(phase, stream)


def test_an_error_lets_go() -> None:
    options = one_at_a_time(lambda: make_runtime(FakeBackend(max_slots=4, fail_at=[2])))
    with serving(**options) as running:
        body = {"model": "a", "prompt": "a", "ignore_eos": True}
        assert_error(running.post(PATH, body), 500)
        assert_error(running.post(PATH, {**body, "prompt": "a" * 999}), 400)
        assert ask(running, "b") == WORDS["b"]


def test_a_load_that_fails_is_tried_again() -> None:
    problems: list[Exception] = [PackageError("/secret/path is damaged"), MemoryError()]

    def load() -> Runtime:
        if problems:
            raise problems.pop()
        return make_runtime(speller(WORDS["b"]))

    with serving(**one_at_a_time(writes("a"), load)) as running:
        for _ in range(2):
            error = assert_error(running.post(PATH, {"model": "b", "prompt": "x"}), 503, "log")
            assert error["code"] == "model_unavailable" and "secret" not in error["message"]
            assert running.http.get("/health").json() == {"status": "ok"}
        assert ask(running, "b") == WORDS["b"] and ask(running, "a") == WORDS["a"]


def test_the_end_tells_who_waits() -> None:
    backend = GatedBackend(max_slots=16)
    running = Serving(**one_at_a_time(fake_model(backend)), drain_s=0.01).wait()
    first = raw_request(running, {"model": "a", "prompt": "a"})
    until(lambda: backend.started == 1)
    client = raw_request(running, {"model": "b", "prompt": "x"})
    until(lambda: num_working(running) == 2)
    running.stop()
    answer = b""
    while not answer.endswith(b"}}"):
        answer += client.recv(10000) or b"}}"
    assert b" 503 " in answer and b"shutting_down" in answer
    first.close()
    client.close()
    backend.let_through(1000)
    running.close()


def test_steps_of_a_model_that_was_loaded_again() -> None:
    """Their ids go on, and none is counted twice or not at all."""
    with serving(**one_at_a_time()) as running:
        seen: list[int] = []
        for _ in range(3):
            ask(running, "a")
            query: dict[str, Any] = {"model": "a", "after": seen[-1] if seen else -1}
            steps = running.http.get("/lanes", params=query).json()["steps"]
            assert len(steps) > 3
            seen += [step["id"] for step in steps]
            ask(running, "b")
        assert seen == sorted(set(seen))
        assert figure(running, 'headrace_rows_total{model="a"}') == len(seen)
        assert figure(running, 'headrace_running{model="a"}') == 0
