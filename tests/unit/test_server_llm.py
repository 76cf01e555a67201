"""The `llm` command against a server: a client that nobody wrote for it, told only its address."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_samples import make_runtime
from server_samples import WAIT_S, Serving, fake_model, serving

LLM = shutil.which("llm")
MODELS = """
- model_id: chat
  model_name: fake
  api_base: {url}/v1
- model_id: raw
  model_name: fake
  api_base: {url}/v1
  completion: true
"""

pytestmark = pytest.mark.skipif(LLM is None, reason="the command llm is not installed")
Ask = Callable[..., str]


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving({"fake": fake_model()}) as running:
        yield running


@pytest.fixture
def ask(server: Serving, tmp_path: Path) -> Ask:
    (tmp_path / "extra-openai-models.yaml").write_text(MODELS.format(url=server.url))
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
    environment.pop("PYTHONPATH", None)  # it may be another Python's

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [str(LLM), *arguments], env=environment, capture_output=True, text=True, timeout=WAIT_S
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.removesuffix("\n")

    return run


def test_llm(ask: Ask) -> None:
    with make_runtime() as runtime:
        turns = [{"role": "system", "content": "brief"}, {"role": "user", "content": "hi"}]
        expected = runtime.chat(turns, max_new_tokens=9).text
        raw = runtime.generate("hi", max_new_tokens=9).text
    limit = ("-o", "max_tokens", "9")
    assert ask("-m", "chat", "-s", "brief", "hi", *limit) == expected
    assert ask("-m", "chat", "-s", "brief", "hi", "--no-stream", *limit) == expected
    assert ask("-m", "raw", "hi", *limit) == raw
