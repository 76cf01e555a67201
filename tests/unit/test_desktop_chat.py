"""The example app, from source and built by PyInstaller: driven by Tk's `send` on an X server
without a screen, with its engine killed while it answers."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import runpy
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
from package_fixtures import PackageMaker
from virtual_display import obstacle, virtual_display

from headrace.runtime import Runtime
from headrace.runtime.child.entry import FLAG

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "desktop_chat"
SEED = 7
QUESTION = "tell me more"
TIMEOUT_S = 90.0
ENTRY, BUTTON, STATUS, LOG = ".!entry", ".!button", ".!label", ".!frame.!scrolledtext"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "")]


@pytest.fixture(scope="module")
def package(tiny_package: PackageMaker) -> Path:
    return tiny_package("w8a8_row", "int8", forms=("ragged",), context=4096)


@pytest.fixture(scope="module")
def display(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with (
        virtual_display(tmp_path_factory.mktemp("display")) as variables,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


def build(folder: Path) -> Path:
    """The program that PyInstaller makes of the example, as it would of an installed headrace."""
    if importlib.util.find_spec("PyInstaller") is None:
        pytest.skip("PyInstaller is not installed")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = ["[pyinstaller40]"]
    lines += [f"{k} = {v}" for k, v in settings["entry-points"]["pyinstaller40"].items()]
    # What an installation would have, whatever this checkout was installed with.
    (folder / "headrace.dist-info").mkdir()
    (folder / "headrace.dist-info" / "entry_points.txt").write_text("\n".join(lines))
    (folder / "headrace.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: headrace\nVersion: 0.1.0\n"
    )
    (folder / "headrace").symlink_to(ROOT)
    done = subprocess.run(
        [sys.executable, "-m", "PyInstaller", "--log-level", "ERROR", EXAMPLE / "chat.spec"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "PYINSTALLER_CONFIG_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    return folder / "dist" / "chat" / "chat"


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def visible(text: str) -> str:
    """Without the control characters that a random model writes; Tk leaves some of them out."""
    return "".join(filter(str.isprintable, text))


class App:
    """A running example, told what to do as if by its user."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        import tkinter

        self.process = psutil.Process(process.pid)
        self._driver = tkinter.Tk(className="driver")
        self._driver.withdraw()
        wait_until(lambda: "chat" in self._driver.winfo_interps())
        wait_until(lambda: "ready" in self.status)

    def tell(self, script: str) -> str:
        return str(self._driver.tk.call("send", "chat", script))

    @property
    def status(self) -> str:
        return self.tell(f"{STATUS} cget -text")

    @property
    def log(self) -> str:
        return self.tell(f"{LOG} get 1.0 end")

    @property
    def engines(self) -> list[psutil.Process]:
        offspring = self.process.children(recursive=True)
        alive = [p for p in offspring if p.status() != psutil.STATUS_ZOMBIE]
        return [p for p in alive if FLAG in p.cmdline()]

    def ask(self, text: str) -> None:
        self.tell(f"{ENTRY} insert 0 {{{text}}}; {BUTTON} invoke")

    def quit(self) -> None:
        engines = self.engines
        self.tell("after idle [wm protocol . WM_DELETE_WINDOW]")
        self._driver.destroy()
        wait_until(lambda: not any(engine.is_running() for engine in engines))


@contextmanager
def running(*command: str | Path) -> Iterator[App]:
    with subprocess.Popen([*command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            app = App(process)
            yield app
            app.quit()
            output, _ = process.communicate(timeout=TIMEOUT_S)
            assert (process.returncode, output) == (0, b"")
        finally:
            process.kill()


@pytest.mark.usefixtures("display")
@pytest.mark.parametrize(("form", "kills"), [("source", 3), ("built", 20)])
def test_the_window_survives_its_engine(
    form: str, kills: int, package: Path, tmp_path: Path
) -> None:
    command = [build(tmp_path)] if form == "built" else [sys.executable, EXAMPLE / "chat.py"]
    with running(*command, package, str(SEED)) as app:
        questions = kill_engines(app, kills)
        shown, status = app.log, app.status
        app.ask("once more")
        wait_until(lambda: len(app.log) > len(shown) + 40)
        app.tell(f"{BUTTON} invoke")  # Stop
        wait_until(lambda: "cancelled" in app.status)
        assert app.tell(f"{BUTTON} cget -text") == "Send"
        assert len(app.engines) == 1

    config = replace(runpy.run_path(str(EXAMPLE / "chat.py"))["CONFIG"], seed=SEED)
    messages: list[dict[str, str]] = []
    with Runtime.load(package) as undisturbed:
        for _ in range(questions):
            messages.append({"role": "user", "content": QUESTION})
            answer = undisturbed.chat(messages, config)
            messages.append({"role": "assistant", "content": answer.text})
    prefixes = {"user": "You: ", "assistant": ""}
    expected = "".join(prefixes[message["role"]] + message["content"] for message in messages)
    assert visible(shown) == visible(expected)
    assert status == f"{answer.completion_tokens} tokens, {answer.finish_reason}"


def kill_engines(app: App, kills: int) -> int:
    """End the engine's process so often, mostly while it answers, and wait for the last answer.

    Returns:
        How many questions were asked.
    """
    choose, questions = random.Random(SEED), 0
    for number in range(kills):
        if app.status != "answering...":
            app.ask(QUESTION)
            questions += 1
        if number % 4 != 3:  # else at once: while it loads
            length = len(app.log)
            wait_until(partial(lambda length: len(app.log) > length, length))
            time.sleep(choose.uniform(0.0, 0.05))
        wait_until(lambda: app.engines)
        (engine,) = app.engines
        engine.kill()
        engine.wait(TIMEOUT_S)  # until it is reaped, so that it is not taken for the next
        # The window answers while the engine cannot, and has no error to show.
        assert re.fullmatch(r"answering\.\.\.|\d+ tokens, \w+", app.status)
    wait_until(lambda: app.status != "answering...")
    return questions
