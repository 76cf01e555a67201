"""`headrace serve` as a process: what it prints, how it ends, exit codes of mistakes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from server_samples import WAIT_S

from headrace.runtime import cli
from headrace.runtime.errors import HeadraceError

COMMAND = [sys.executable, "-m", "headrace.runtime.cli", "serve"]


@pytest.fixture(scope="module")
def package(tiny_package: Callable[..., Path]) -> Path:
    return tiny_package("fp32")


@contextmanager
def started(
    *args: str, key: str | None = None, command: Sequence[str] = COMMAND
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, once it is ready, and its address."""
    environment = {**os.environ, **({"HEADRACE_API_KEY": key} if key else {})}
    process = subprocess.Popen(
        [*command, *args, "--port", "0"], stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"ready at (http://\S+)/v1", line):
                yield process, found[1]
                break
        else:
            raise AssertionError("it ended before it was ready")
    finally:
        process.kill()
        process.communicate()


def test_it_serves_and_ends_when_told_to(package: Path) -> None:
    with started(str(package)) as (process, url):
        answer = httpx2.post(f"{url}/v1/completions", json={"prompt": "ab", "max_tokens": 3})
        assert answer.status_code == 200 and answer.json()["model"] == "tiny"
        assert httpx2.get(f"{url}/health").json() == {"status": "ok"}
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=WAIT_S)
        assert (process.returncode, rest) == (0, "")


def test_ctrl_c(package: Path) -> None:
    with started(str(package)) as (process, _):
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=WAIT_S)
        assert (process.returncode, rest) == (cli.EXIT_INTERRUPTED, "")


def test_answers_under_way_are_finished(package: Path) -> None:
    """Also by a client on the same connection; new ones are not taken."""
    with started(str(package)) as (process, url):
        body = {"prompt": "ab", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT_S) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""] and '"finish_reason":"length"' in rest[-4]
        assert process.wait(WAIT_S) == 0


def test_a_key_from_the_environment(package: Path) -> None:
    with started(str(package), key="secret") as (_, url):
        assert httpx2.get(f"{url}/v1/models").status_code == 401
        right = {"Authorization": "Bearer secret"}
        assert httpx2.get(f"{url}/v1/models", headers=right).status_code == 200


def complaint(capsys: pytest.CaptureFixture[str], code: int, *args: str) -> str:
    """The one line that the command ends with."""
    assert cli.main(["serve", *args]) == code
    lines = capsys.readouterr().err.splitlines()
    assert lines and lines[-1].startswith("headrace: ")
    return lines[-1]


def test_mistakes(
    package: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    taken = socket.create_server(("127.0.0.1", 0))
    port = str(taken.getsockname()[1])
    folder = str(package)
    assert f"port {port} of 127.0.0.1 is taken" in complaint(capsys, 1, folder, "--port", port)
    taken.close()
    assert "no address of this machine" in complaint(capsys, 1, folder, "--host", "no.such.invalid")
    assert "there is no model" in complaint(capsys, 1, str(tmp_path / "nowhere"))
    assert "one model of the name tiny" in complaint(capsys, 2, folder, folder)
    assert "--max-requests=0" in complaint(capsys, 2, folder, "--max-requests", "0")
    assert "--memory-bytes=0" in complaint(capsys, 2, folder, "--memory-bytes", "0")
    line = complaint(capsys, 2, folder, "--memory-bytes", "5000")
    assert "--memory-bytes=5000" in line and "which tiny takes alone" in line
    assert "--api-key" in complaint(capsys, 2, folder, "--api-key", "")
    assert "--cors-origin" in complaint(capsys, 2, folder, "--cors-origin", "*")
    assert "num_threads" in complaint(capsys, 2, folder, "--threads", "0", "--port", "0")


def test_threads_share_a_heap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    monkeypatch.setattr(
        "headrace.runtime.machine.memory.share_heap", lambda: called.append("before any model")
    )
    complaint(capsys, 1, str(tmp_path / "nowhere"))
    assert called == ["before any model"]


def test_several_models_share_threads(
    package: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(num_threads: int | None) -> None:
        raise HeadraceError(f"{num_threads} threads are to be shared")

    monkeypatch.setattr("headrace.runtime.factory.share_threads", refuse)
    other = shutil.copytree(package, tmp_path / "other")
    line = complaint(capsys, 1, str(package), str(other), "--threads", "2", "--port", "0")
    assert "2 threads are to be shared" in line


def test_a_package_that_cannot_be_loaded_ends_it(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in package.rglob("*"):
        if path.is_file():
            target = damaged / path.relative_to(package)
            target.parent.mkdir(exist_ok=True, parents=True)
            target.write_bytes(path.read_bytes())
    (damaged / "tokenizer.json").unlink()
    line = complaint(capsys, 1, str(damaged), "--port", "0")
    assert "tokenizer.json" in line


def test_without_the_extra(
    package: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.runtime.commands.serve._NEEDED", ("no_such_module",))
    assert 'pip install "headrace[server]"' in complaint(capsys, 2, str(package))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cannot limit processors here")
def test_one_processor(package: Path) -> None:
    """Threads follow the limit, in what is said and in what is served."""
    limit = "import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    run = f"{limit}; from headrace.runtime import cli; sys.exit(cli.main(sys.argv[1:]))"
    command = [sys.executable, "-c", run]
    told = subprocess.run([*command, "doctor", "--json"], capture_output=True, text=True)
    assert json.loads(told.stdout)["threads"]["num_threads"] == 1
    with started(str(package), command=[*command, "serve"]) as (_, url):
        answer = httpx2.post(f"{url}/v1/completions", json={"prompt": "ab", "max_tokens": 3})
        assert answer.json()["usage"]["completion_tokens"] == 3
