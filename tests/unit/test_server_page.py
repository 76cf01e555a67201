"""What the page is served with, and what only it asks for: lanes, and details of tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
from engine_samples import make_runtime
from server_samples import Serving, assert_error, fake_model, serving
from test_step_log import reciter

from headrace.runtime.server.lanes import Ration
from headrace.runtime.server.problems import ApiError

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving({"reciter": lambda: make_runtime(reciter())}) as running:
        yield running


def test_the_page_may_load_nothing_else(server: Serving) -> None:
    answer = server.http.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"

    class Parts(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert tag != "style"
            for name, value in attrs:
                assert name != "style" and not name.startswith("on"), (tag, name)
                if name in ("src", "href"):
                    found.append(str(value))

    found: list[str] = []
    Parts().feed(answer.text)
    assert not re.search(r"<script[^>]*>[^<]", answer.text)
    for path in found:
        part = server.http.get(path)
        assert path.startswith("/page/") and part.status_code == 200
        assert part.headers["content-security-policy"] == policy
        for name in re.findall(r'from "\./(.*?)"', part.text):
            kind = server.http.get(f"/page/{name}").headers["content-type"]
            assert kind.startswith("text/javascript")


@pytest.mark.parametrize("path", ["/page/", "/page/../app.py", "/page/%2e%2e/app.py", "/page/x"])
def test_no_path_is_taken_from_requests(server: Serving, path: str) -> None:
    assert server.http.get(path).status_code == 404


def test_the_page_is_open_and_what_it_asks_for_is_not() -> None:
    with serving({"fake": fake_model()}, api_key="secret") as running:
        assert running.http.get("/").status_code == 200
        assert running.http.get("/page/app.js").status_code == 200
        assert_error(running.http.get("/lanes"), 401)
        hostile = running.http.get("/", headers={"Host": "evil.example"})
        assert_error(hostile, 403)


def test_lanes(server: Serving) -> None:
    before = server.http.get("/lanes").json()
    assert before["models"] == ["reciter"] and before["model"] == "reciter"
    last = before["steps"][-1]["id"] if before["steps"] else -1
    body = {"messages": MESSAGES, "max_tokens": 40}
    assert server.post("/v1/chat/completions", body).status_code == 200
    found = server.http.get("/lanes", params={"model": "reciter", "after": last}).json()
    lanes = [lane for lane in server.runtime("reciter").lanes if lane.step_id > last and lane.rows]
    assert [step["id"] for step in found["steps"]] == [lane.step_id for lane in lanes]
    for step, lane in zip(found["steps"], lanes, strict=True):
        assert [tuple(row) for row in step["rows"]] == [tuple(row) for row in lane.rows]
    assert found["memory_bytes"] > 1e6 and found["now_s"] >= found["steps"][-1]["end_s"]
    assert (found["running"], found["waiting"]) == (0, 0)
    nothing = {"after": found["steps"][-1]["id"]}
    assert server.http.get("/lanes", params=nothing).json()["steps"] == []
    for wrong in ("x", "", "1e3", "9" * 30, "٣"):
        assert_error(server.http.get("/lanes", params={"after": wrong}), 400, "after")
    assert_error(server.http.get("/lanes", params={"model": "other"}), 404)


def test_lanes_are_rationed() -> None:
    now = [100.0]
    ration = Ration(4.0, lambda: now[0])
    for _ in range(4):
        ration.take()
    with pytest.raises(ApiError) as refused:
        ration.take()
    assert refused.value.status == 429 and "Retry-After" in refused.value.headers
    now[0] += 0.25
    ration.take()
    with pytest.raises(ApiError):
        ration.take()
    now[0] += 1000.0  # what was not used is not kept
    for _ in range(4):
        ration.take()
    with pytest.raises(ApiError):
        ration.take()


def details(choice: dict[str, Any]) -> tuple[list[float], list[bool]]:
    found = choice.get("headrace", {"entropy_nats": [], "drafted": []})
    return found["entropy_nats"], found["drafted"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("has_logprobs", [False, True])
def test_details_of_tokens(server: Serving, path: str, has_logprobs: bool) -> None:
    is_chat = "chat" in path
    body: dict[str, Any] = {"max_tokens": 40, "headrace": {"token_details": True}}
    body |= {"messages": MESSAGES} if is_chat else {"prompt": "assistant "}
    if has_logprobs:
        body |= {"logprobs": True} if is_chat else {"logprobs": 1}
    whole = server.post(path, body).json()
    nats, drafted = details(whole["choices"][0])
    assert len(nats) == len(drafted) == 40 == whole["usage"]["completion_tokens"]
    assert any(drafted) and all(value >= 0.0 for value in nats)
    with server.client() as client:
        create: Any = client.chat.completions.create if is_chat else client.completions.create
        extra = {"headrace": body.pop("headrace")}
        events = list(create(model="reciter", stream=True, extra_body=extra, **body))
    parts = [details(choice) for event in events for choice in event.model_dump()["choices"]]
    assert sum(len(values) for values, _ in parts) == 40
    if has_logprobs:
        for event in events:
            (choice,) = event.model_dump()["choices"]
            given = (choice["logprobs"] or {}).get("content" if is_chat else "tokens") or []
            assert len(given) == len(details(choice)[0])
    plain = server.post(path, body).json()["choices"][0]
    assert "headrace" not in plain


def test_the_extension_knows_its_keys(server: Serving) -> None:
    body = {"messages": MESSAGES, "headrace": {"tokens": True}}
    assert_error(server.post("/v1/chat/completions", body), 400, "headrace.tokens")


def test_cached_tokens_are_counted(server: Serving) -> None:
    prompt = "the cat sat on the mat and looked at the moon"
    body = {"prompt": prompt, "max_tokens": 4}
    first = server.post("/v1/completions", body).json()["usage"]
    again = server.post("/v1/completions", {**body, "n": 2}).json()["usage"]
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert again["prompt_tokens_details"] == {"cached_tokens": len(prompt) - 1}
    longer = {"prompt": [f"{prompt} x", "zzz"], "max_tokens": 4}
    both = server.post("/v1/completions", longer).json()["usage"]
    assert both["prompt_tokens_details"] == {"cached_tokens": len(prompt)}
