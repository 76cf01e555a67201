"""An engine in a process of its own: the same answers, whatever happens to the process."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from package_fixtures import PackageMaker

from headrace.runtime import GenerationConfig, Runtime
from headrace.runtime.child import entry
from headrace.runtime.child.process import ChildProcess, child_command
from headrace.runtime.errors import (
    BackendUnavailableError,
    ConfigError,
    EngineProcessError,
    HeadraceError,
    InsufficientMemoryError,
    PackageError,
)

linux = pytest.mark.skipif(sys.platform != "linux", reason="what Linux's kernel does")
posix = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
TIMEOUT_S = 60.0
GREEDY = GenerationConfig(max_new_tokens=80, ignore_eos=True)
CONFIGS = {
    "Once upon a time": GREEDY,
    "There was a": GenerationConfig(max_new_tokens=80, temperature=0.9, seed=1, ignore_eos=True),
    "In the": GenerationConfig(
        max_new_tokens=60, temperature=0.8, top_p=0.9, seed=2, logprobs=1, ignore_eos=True
    ),
    "the and her": GenerationConfig(
        max_new_tokens=80, temperature=1.1, seed=3, n=2, stop=("in the", "qq"), ignore_eos=True
    ),
}


@pytest.fixture(scope="module")
def package(tiny_package: PackageMaker) -> Path:
    return tiny_package("w8a8_row", "int8", forms=("ragged",))


@pytest.fixture(scope="module")
def isolated(package: Path) -> Iterator[Runtime]:
    with Runtime.load(package, isolated=True) as runtime:
        yield runtime


@pytest.fixture
def children() -> Callable[[], set[int]]:
    """Gives the ids of processes that the test has started and that run."""

    def running() -> set[int]:
        found = psutil.Process().children()
        return {p.pid for p in found if p.status() != psutil.STATUS_ZOMBIE}

    others = running()
    return lambda: running() - others


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def test_all_ways_to_ask_give_the_same(package: Path, isolated: Runtime, tmp_path: Path) -> None:
    with Runtime.load(package) as here:
        for prompt, config in CONFIGS.items():
            expected = here.generate(prompt, config)
            assert isolated.generate(prompt, config) == expected
            pieces = list(isolated.stream(prompt, config))
            assert sum(len(piece.token_ids) for piece in pieces) == expected.completion_tokens
            assert asyncio.run(isolated.agenerate(prompt, config)) == expected
        messages = [{"role": "user", "content": "tell me more"}]
        assert isolated.chat(messages, GREEDY) == here.chat(messages, GREEDY)
        # What one has written the other can read.
        for one, other in ((here, isolated), (isolated, here)):
            one.generate("a text that is kept", GREEDY)
            one.save_session(tmp_path / "file", "a text that is kept")
            fed = sum(step.num_tokens for step in other.steps)
            other.load_session(tmp_path / "file")
            other.generate("a text that is kept", max_new_tokens=1)
            assert sum(step.num_tokens for step in other.steps) - fed <= 2
        assert isolated.capabilities == here.capabilities
        assert isolated.default_config == here.default_config


def test_cancelling_is_heard(isolated: Runtime) -> None:
    handle = isolated.submit("Once", GREEDY)
    next(iter(handle))
    handle.cancel()
    assert handle.result(TIMEOUT_S).completion_tokens < 80


@posix
@pytest.mark.slow
def test_twenty_kills_at_random_moments(package: Path, children: Callable[[], set[int]]) -> None:
    """Streams under way go on with the same text, and no process is left behind."""
    with Runtime.load(package) as here:
        expected = {prompt: here.generate(prompt, config) for prompt, config in CONFIGS.items()}
    choose, wrong, done = random.Random(5), [], threading.Event()
    with Runtime.load(package, isolated=True) as runtime:

        def ask(prompt: str, config: GenerationConfig) -> None:
            while not done.is_set():
                texts = [""] * config.n
                for delta in runtime.stream(prompt, config):
                    texts[delta.index] += delta.text
                if texts != [choice.text for choice in expected[prompt].choices]:
                    wrong.append(prompt)

        threads = [threading.Thread(target=ask, args=item) for item in CONFIGS.items()]
        for thread in threads:
            thread.start()
        killed: set[int] = set()
        for number in range(20):
            if number % 5:  # else at once: while it loads
                seen = runtime.steps[-1:]
                wait_until(partial(lambda seen: runtime.steps[-1:] != seen, seen))
                time.sleep(choose.uniform(0.0, 0.2))
            wait_until(lambda: children() - killed)
            for pid in children() - killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        done.set()
        for thread in threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
        assert not wrong and len(killed) >= 20
    assert not children()


@posix
def test_an_idle_process_that_died_is_replaced(isolated: Runtime) -> None:
    expected = isolated.generate("Once", GREEDY)
    backend: Any = isolated._engine._backend
    pid = backend._child.pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(pid))  # no zombie is left until somebody asks
    assert isolated.generate("Once", GREEDY) == expected
    assert backend._child.pid != pid


def test_its_thread_may_end_before_the_process_does(
    package: Path, children: Callable[[], set[int]]
) -> None:
    loaded: list[Runtime] = []
    thread = threading.Thread(target=lambda: loaded.append(Runtime.load(package, isolated=True)))
    thread.start()
    thread.join()
    with loaded[0] as runtime:
        before = children()
        time.sleep(0.1)
        runtime.generate("Once", max_new_tokens=2)
        assert children() == before


PARENT = """
import os, sys, threading, time
from headrace.runtime import Runtime
runtime = Runtime.load(sys.argv[1], isolated=True)
if "busy" in sys.argv:
    stream = runtime.stream("Once", ignore_eos=True)
    next(stream)
if "forked" in sys.argv and os.fork() == 0:  # holds what its parent had open
    time.sleep(60)
    os._exit(0)
print("ready", flush=True)
time.sleep(60)
"""


@posix
@pytest.mark.parametrize(
    "how", ["idle", "busy", pytest.param("forked", marks=[linux, pytest.mark.slow])]
)
def test_the_process_dies_with_its_parent(package: Path, how: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(package), how], stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
        offspring = psutil.Process(parent.pid).children(recursive=True)
        engines = [process for process in offspring if entry.FLAG in process.cmdline()]
        assert len(engines) == 1
        parent.kill()
        wait_until(lambda: not engines[0].is_running())
        for process in offspring:
            if process.is_running():
                process.kill()


SILENT = """
import os, sys, psutil
from headrace.runtime import Runtime
with Runtime.load(sys.argv[1], isolated=True) as runtime:
    before = runtime.generate("Once", max_new_tokens=20)
    stream = runtime.stream("Once", max_new_tokens=20)
    next(stream)
    psutil.Process().children()[0].kill()
    assert sum(len(piece.token_ids) for piece in stream) == before.completion_tokens - 1
    psutil.Process().children()[0].terminate()
    assert runtime.generate("Once", max_new_tokens=20) == before
    psutil.Process().children()[0].send_signal(2)  # Ctrl-C is for the app
    assert runtime.generate("Once", max_new_tokens=20) == before
left = Runtime.load(sys.argv[1], isolated=True)  # never closed
"""


@posix
def test_nothing_is_printed(package: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SILENT, str(package)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("is_isolated", [False, True])
def test_errors_of_loading_are_the_same(
    package: Path, tmp_path: Path, is_isolated: bool, children: Callable[[], set[int]]
) -> None:
    def fails(error: type[HeadraceError], match: str, folder: Path = package, **opts: Any) -> None:
        with pytest.raises(error, match=match):
            Runtime.load(folder, isolated=is_isolated, **opts)

    fails(PackageError, "manifest.json", tmp_path)
    fails(ConfigError, "device='gpu'", device="gpu")
    fails(BackendUnavailableError, "graphs for cpu", device="cuda")
    fails(ConfigError, "form='round'", form="round")
    fails(InsufficientMemoryError, "no room for a single token", kv_budget_bytes=1)
    assert not children()


@pytest.mark.slow
def test_loading_again_and_again_does_not_grow(
    package: Path, children: Callable[[], set[int]]
) -> None:
    process = psutil.Process()
    count_open: Callable[[], int] = getattr(process, "num_fds", None) or process.num_handles

    def cycle() -> None:
        with Runtime.load(package, isolated=True) as runtime:
            runtime.generate("Once", max_new_tokens=3)

    for _ in range(3):
        cycle()
    before = process.memory_info().rss, count_open(), threading.active_count()
    for _ in range(17):
        cycle()
    rss_bytes, num_open, num_threads = (
        process.memory_info().rss,
        count_open(),
        threading.active_count(),
    )
    assert (num_open, num_threads) == before[1:]
    assert rss_bytes - before[0] < 4 << 20
    assert not children()


@posix
def test_a_package_that_was_changed_is_noticed(
    tiny_package: PackageMaker, tmp_path: Path, children: Callable[[], set[int]]
) -> None:
    one = shutil.copytree(tiny_package("w8a8_row", "int8", forms=("ragged",)), tmp_path / "one")
    other = tiny_package("w8a8_row", "int8", forms=("ragged",), seed=5)
    with Runtime.load(one, isolated=True) as runtime:
        runtime.generate("Once", max_new_tokens=2)
        shutil.rmtree(one)
        shutil.copytree(other, one)
        (pid,) = children()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(HeadraceError, match="was changed while it was in use"):
            runtime.generate("Once", max_new_tokens=2)


def test_what_a_child_said_last_is_in_the_message() -> None:
    child = ChildProcess("nonsense")
    with pytest.raises(EngineProcessError, match=r"ended with status 1: .*KeyError: 'nonsense'"):
        child.receive(0)
    child.close()


def test_a_system_without_room_for_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python3")
    with pytest.raises(EngineProcessError, match="no process can be started"):
        ChildProcess("engine")


def test_an_app_has_to_ask_first(
    package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "blender")
        with pytest.raises(ConfigError, match="no Python interpreter"):
            Runtime.load(package, isolated=True)
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(entry, "_was_asked", False)
    with pytest.raises(ConfigError, match="freeze_support"):
        Runtime.load(package, isolated=True)
    entry.freeze_support()
    assert child_command("engine") == [sys.executable, entry.FLAG, "engine"]


@posix
def test_a_frozen_app_becomes_its_own_child(
    package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    app = tmp_path / "app"
    app.write_text(
        f"#!{sys.executable}\nimport sys; sys.path[:] = {sys.path!r}\n"
        "import headrace.runtime; headrace.runtime.freeze_support(); sys.exit('the app started')\n"
    )
    app.chmod(0o755)
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(sys, "executable", str(app))
    monkeypatch.setattr(entry, "_was_asked", True)
    with Runtime.load(package, isolated=True) as runtime:
        assert runtime.generate("Once", max_new_tokens=3).completion_tokens
