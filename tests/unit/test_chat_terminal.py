"""`headrace chat` at a terminal: Ctrl-C, texts of several lines, history."""

from __future__ import annotations

import importlib.util
import io
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_samples import make_runtime

from headrace.runtime.commands.chat import Conversation
from headrace.runtime.commands.typed import read_text
from headrace.runtime.store.places import HOME_VARIABLE

WAIT_S = 120.0
REPEAT_S = 2.0


def typing(*lines: str | type[BaseException]) -> Callable[[str], str]:
    """In the place of `input`."""
    rest = iter(lines)

    def read_line(_: str) -> str:
        line = next(rest, EOFError)
        if isinstance(line, str):
            return line
        raise line

    return read_line


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["hello"], "hello"),
        (['hello """ you'], 'hello """ you'),
        (['"""one line"""'], "one line"),
        (['"""', "a", "", "b", '"""'], "a\n\nb"),
        (['"""a', 'b"""  '], "a\nb"),
        (['"""', "/quit", '"""'], "/quit"),
        ([], None),
        (['"""', "a"], None),
    ],
)
def test_texts_of_several_lines(lines: list[str], text: str | None) -> None:
    assert read_text(typing(*lines)) == text


class Interrupted(io.StringIO):
    """A terminal where Ctrl-C is pressed when an answer is complete, as its line ends."""

    def write(self, text: str) -> int:
        if text == "\n":
            raise KeyboardInterrupt
        return super().write(text)


def test_a_turn_that_is_complete_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with make_runtime() as runtime:
        conversation = Conversation(runtime, None, {"max_new_tokens": 4})
        conversation.ask("a")
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(sys, "stdout", Interrupted())
            conversation.ask("b")
        assert conversation.keep("/save", str(tmp_path / "file")).startswith("saved 4 messages")


def test_an_interrupt_drops_what_was_typed() -> None:
    keyboard = typing('"""', "a", KeyboardInterrupt, "b")
    with pytest.raises(KeyboardInterrupt):
        read_text(keyboard)
    assert read_text(keyboard) == "b"


class Terminal:
    """A program at a pseudo terminal."""

    def __init__(self, command: list[str]) -> None:
        import pty

        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_take_terminal,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, *words: str) -> str:
        """Wait for one of these words; what came up to then, which is not looked at again."""
        end = time.monotonic() + WAIT_S
        while not (found := [word for word in words if word in self.seen]):
            self.wait(end - time.monotonic())
        text, self.seen = self.seen.split(found[0], 1)
        return text + found[0]

    def wait(self, timeout_s: float = WAIT_S) -> None:
        """Wait for anything to appear."""
        ready, _, _ = select.select([self._master], [], [], timeout_s)
        assert ready, self.seen
        try:
            self.seen += os.read(self._master, 4096).decode("utf-8", "replace")
        except OSError:  # Linux says so when the program has ended
            raise AssertionError(f"it ended: {self.seen}") from None

    def interrupt(self) -> None:
        """Press Ctrl-C until there is a prompt again. Python hears of one that comes between a
        prompt and its wait for a key only with the next key, as anybody at a terminal finds out."""
        for _ in range(10):
            self.type("\x03")
            end = time.monotonic() + REPEAT_S
            while "> " not in self.seen and time.monotonic() < end:
                if select.select([self._master], [], [], max(end - time.monotonic(), 0))[0]:
                    self.wait()
            if "> " in self.seen:
                self.until("> ")
                return
        raise AssertionError(f"no prompt after ten times Ctrl-C: {self.seen}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def _take_terminal() -> None:
    """In the child: its standard input is the terminal that Ctrl-C comes from."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal(
    tiny_package: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Terminal]:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    package = tiny_package("fp32", context=4096)
    command = [sys.executable, "-m", "headrace.runtime.cli", "chat", str(package)]
    shown = Terminal([*command, "--temperature", "9", "--max-new-tokens", "3000"])
    yield shown
    shown.close()


needs_terminal = pytest.mark.skipif(
    importlib.util.find_spec("termios") is None, reason="there are no pseudo terminals here"
)


@needs_terminal
def test_ctrl_c_ends_the_answer_and_not_the_program(terminal: Terminal, tmp_path: Path) -> None:
    terminal.until("> ")
    for _ in range(20):  # a random model may be done before it is interrupted
        terminal.type("hello\r")
        terminal.until("hello\r\n")
        if not terminal.seen:
            terminal.wait()  # for the beginning of the answer
        terminal.type("\x03")
        if "[interrupted]" in terminal.until("[interrupted]", "\r\n> "):
            break
    else:
        raise AssertionError("no answer could be interrupted")
    terminal.until("> ")
    terminal.type("half a line")
    terminal.until("half a line")
    terminal.interrupt()
    terminal.type("/stats\r")
    assert "tokens of context used" in terminal.until("of context used")
    terminal.until("> ")
    terminal.type('"""\r')
    terminal.until(". ")
    terminal.type("x")
    terminal.until("x")
    terminal.interrupt()
    terminal.type(f"/save {tmp_path / 'chat'}\r")
    terminal.until("saved ")
    terminal.type("/quit\r")
    assert terminal.process.wait(WAIT_S) == 0
    if importlib.util.find_spec("readline"):
        history = tmp_path / "home" / "chat_history"
        assert "/stats" in history.read_text()
        assert history.stat().st_mode & 0o077 == 0


@needs_terminal
def test_ctrl_d_ends_it(terminal: Terminal) -> None:
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.process.wait(WAIT_S) == 0
