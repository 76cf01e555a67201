"""A server in this process, on a free port, with models made for the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
from engine_samples import make_runtime
from hypothesis import strategies as st

from headrace.backends.fake import FakeBackend
from headrace.runtime.api import Runtime
from headrace.runtime.core import StepPlan
from headrace.runtime.server.app import make_app
from headrace.runtime.server.listen import Server, listening_socket
from headrace.runtime.server.models import Models
from headrace.runtime.server.options import ServerOptions
from headrace.runtime.server.residents import Loader, Served

WAIT_S = 60.0  # for what must happen; no test passes or fails by how long it takes


# Values that are as good as any.
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["fake", "auto", "user", "text", "json_object", "a"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


class Serving:
    """A server that runs.

    Args:
        served: what makes each model, with what is told of it where that matters.
        budget_bytes, wait_s: see `Models`.

    Attributes:
        url: without a slash at its end.
        http: a client of its own.
        server, models: what it is made of.
    """

    def __init__(
        self,
        served: Mapping[str, Loader | Served],
        budget_bytes: int | None = None,
        wait_s: float = WAIT_S,
        **options: Any,
    ) -> None:
        self.options = ServerOptions(**options)
        told = {n: s if isinstance(s, Served) else Served(s) for n, s in served.items()}
        self.models = Models(told, budget_bytes, wait_s)
        self._listener = listening_socket("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.ready = threading.Event()
        self.server = Server(
            make_app(self.models, self.options), self.models, self.options, self.ready.set
        )
        self._thread = threading.Thread(target=self.server.run, args=([self._listener],))
        self._thread.start()
        self.http = httpx2.Client(base_url=self.url, timeout=WAIT_S)

    def wait(self) -> Serving:
        """Until the models are loaded."""
        assert self.ready.wait(WAIT_S)
        return self

    def client(self, **options: Any) -> openai.OpenAI:
        """OpenAI's own, with its defaults but for the address and retries."""
        return openai.OpenAI(
            **{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, **options}
        )

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            **{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, **options}
        )

    def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        """A body as JSON, or bytes as they are."""
        if isinstance(body, bytes):
            return self.http.post(path, content=body, **options)
        return self.http.post(path, json=body, **options)

    def runtime(self, name: str) -> Runtime:
        """One that is loaded."""
        found = self.models.loaded[name]
        assert isinstance(found, Runtime)
        return found

    def stop(self) -> None:
        """As SIGTERM does."""
        self.server.should_exit = True

    def join(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.http.close()
        self.stop()
        self.join()


@contextmanager
def serving(served: Mapping[str, Loader | Served], **options: Any) -> Iterator[Serving]:
    """A server with its models loaded; closed at the end."""
    running = Serving(served, **options)
    try:
        yield running.wait()
    finally:
        running.close()


class GatedBackend(FakeBackend):
    """Waits before each step that has rows until it is let through."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._permits = threading.Semaphore(0)
        self.started = 0

    def submit(self, plan: StepPlan) -> int:
        if plan.rows:
            self.started += 1
            assert self._permits.acquire(timeout=WAIT_S)
        return super().submit(plan)

    def let_through(self, steps: int) -> None:
        self._permits.release(steps)


def fake_model(backend: FakeBackend | None = None, **options: Any) -> Loader:
    """A model of letters (tests/unit/engine_samples.py)."""
    return lambda: make_runtime(backend or FakeBackend(max_slots=16), **options)


def package_model(folder: Path, **options: Any) -> Loader:
    return lambda: Runtime.load(folder, **options)


def assert_error(answer: httpx2.Response, status: int, *words: str) -> dict[str, Any]:
    """The answer is an error of this status in OpenAI's shape whose message holds these words."""
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert all(word in error["message"] for word in words), error
    assert "\n" not in error["message"] and "Traceback" not in answer.text
    return error
