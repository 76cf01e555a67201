"""Many prompts from a file: every line answered once, in order, whatever happens on the way."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.runtime import Runtime, cli
from headrace.runtime.commands import answer_file as files
from headrace.runtime.commands.answer_file import answer_file, journal_of, read_lines
from headrace.runtime.errors import BackendError, ConfigError

GREEDY = ["--max-new-tokens", "6", "--temperature", "0"]
IDENTITY = {"input_sha256": "0"}


@pytest.fixture(scope="module")
def package(tiny_package: Callable[..., Path]) -> Path:
    return tiny_package("fp32")


def write(path: Path, *lines: object) -> Path:
    """Objects as JSON lines; bytes as they are."""
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(raw))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def run(package: Path, source: Path, output: Path, *options: str) -> int:
    command = ["run", str(package), "--input", str(source), "--output", str(output)]
    return cli.main([*command, *GREEDY, *options])


def test_answers_are_those_of_the_library(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    source = write(
        tmp_path / "in.jsonl",
        {"prompt": "hello", "custom_id": "first"},
        b"",
        {"messages": talk, "max_new_tokens": 3},
        "hello",
        {"prompt": "hello", "n": 2, "temperature": 2.0, "seed": 1},
    )
    output = tmp_path / "out.jsonl"
    assert run(package, source, output) == 0
    first, second, third, several = read(output)
    with Runtime.load(package) as runtime:
        plain = runtime.chat([talk[1]], max_new_tokens=6, temperature=0)
        short = runtime.chat(talk, max_new_tokens=3, temperature=0)
    assert first == {
        "line": 1,
        "custom_id": "first",
        "text": plain.text,
        "finish_reason": plain.finish_reason,
        "prompt_tokens": plain.prompt_tokens,
        "completion_tokens": plain.completion_tokens,
    }
    assert (second["line"], second["text"]) == (3, short.text)
    assert (third["line"], third["text"]) == (4, plain.text)
    assert len(several["choices"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    assert "4 of 4 lines are answered in" in capsys.readouterr().err


def test_raw_text(package: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", {"prompt": "hello"})
    assert run(package, source, tmp_path / "out.jsonl", "--raw") == 0
    with Runtime.load(package) as runtime:
        expected = runtime.generate("hello", max_new_tokens=6, temperature=0).text
    assert read(tmp_path / "out.jsonl")[0]["text"] == expected


def test_lines_that_fail_are_marked_and_no_other(
    package: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 4000)
    wrong: list[tuple[object, str]] = [
        (b'{"prompt": "torn', "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (["hello"], 'either "prompt" or "messages"'),
        ({"prompt": "a", "messages": []}, 'either "prompt" or "messages"'),
        ({"prompt": 3}, '"prompt" is not a text'),
        ({"prompt": "a", "custom_id": 3}, '"custom_id" is not a text'),
        ({"prompt": "a", "max_tokens": 3}, "did you mean max_new_tokens"),
        ({"prompt": "a", "temperature": -1}, "temperature=-1"),
        ({"prompt": "word " * 600}, "the context holds 512"),
        ({"messages": [{"role": "user"}]}, ""),
        ({"prompt": "x" * 5000}, "the line is too long"),
        (b"[" * 3000, "not JSON"),
    ]
    right = {"prompt": "hello"}
    source = write(tmp_path / "in.jsonl", right, *(line for line, _ in wrong), right)
    output = tmp_path / "out.jsonl"
    assert run(package, source, output) == cli.EXIT_FAILED
    records = read(output)
    assert [record["line"] for record in records] == list(range(1, len(wrong) + 3))
    assert records[0]["text"] == records[-1]["text"]
    for record, (_, message) in zip(records[1:-1], wrong, strict=True):
        assert message in record["error"]
    complaints = capsys.readouterr().err
    assert "line 2 failed: the line is not JSON" in complaints
    assert f"{len(wrong)} lines failed" in complaints
    assert "Traceback" not in complaints


def test_a_run_is_taken_up_only_as_it_was(
    package: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device that fails ends the run, whose answers stay for the next."""
    source = write(tmp_path / "in.jsonl", *({"prompt": f"hello {i}"} for i in range(40)))
    output, undisturbed = tmp_path / "out.jsonl", tmp_path / "undisturbed.jsonl"
    assert run(package, source, undisturbed) == 0
    answer, asked = Runtime.achat, []

    async def failing(self: Runtime, *args: Any) -> Any:
        asked.append(args)
        if len(asked) > 35:
            raise BackendError("the device is gone")
        return await answer(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Runtime, "achat", failing)
        assert run(package, source, output) == cli.EXIT_FAILED
    assert "the device is gone" in capsys.readouterr().err
    assert not output.exists()
    kept = len(read(journal_of(output))) - 1
    assert 0 < kept < 40
    assert run(package, source, output, "--seed", "3") == cli.EXIT_USAGE
    assert "out.jsonl.part was begun with" in capsys.readouterr().err
    assert run(package, source, output) == 0
    assert f"{kept} of 40 answers are there" in capsys.readouterr().err
    assert output.read_bytes() == undisturbed.read_bytes()
    assert run(package, source, output) == cli.EXIT_USAGE
    assert "a file that is not there yet" in capsys.readouterr().err


def test_files_that_cannot_be_used(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", {"prompt": "hello"})
    assert run(package, tmp_path / "nothing.jsonl", tmp_path / "out.jsonl") == cli.EXIT_FAILED
    assert run(package, source, source / "out.jsonl") == cli.EXIT_FAILED
    assert "Traceback" not in capsys.readouterr().err
    assert cli.main(["run", str(package), "--input", str(source)]) == cli.EXIT_USAGE
    assert cli.main(["run", str(package)]) == cli.EXIT_USAGE
    with answer_file(tmp_path / "out.jsonl", 1, IDENTITY):
        assert run(package, source, tmp_path / "out.jsonl") == cli.EXIT_USAGE
    assert "no other process is writing" in capsys.readouterr().err


def test_an_empty_input_has_no_answers(package: Path, tmp_path: Path) -> None:
    assert run(package, write(tmp_path / "in.jsonl"), tmp_path / "out.jsonl") == 0
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def answered(output: Path, numbers: list[int], num_lines: int) -> set[int]:
    """Add answers for these lines; which lines were there before."""
    with answer_file(output, num_lines, IDENTITY) as answers:
        before = {number for number in range(1, num_lines + 1) if answers.has(number)}
        for number in numbers:
            answers.add(number, {"text": f"answer {number} é\n"})
    return before


@given(st.permutations(range(1, 9)), st.integers(0, 8), st.data())
def test_a_journal_cut_anywhere_is_repaired(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], kept: int, data: st.DataObject
) -> None:
    output = tmp_path_factory.mktemp("answers") / "out.jsonl"
    answered(output, order[:kept], 8)
    journal = journal_of(output)
    content = journal.read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    journal.write_bytes(content[:cut])
    whole = max(content[:cut].count(b"\n") - 1, 0)
    before = answered(output, [], 8)
    assert before == set(order[:whole])
    with answer_file(output, 8, IDENTITY) as answers:
        for number in set(order) - before:
            answers.add(number, {"text": f"answer {number} é\n"})
        answers.finish()
    assert [record["line"] for record in read(output)] == list(range(1, 9))
    assert not journal.exists()


def test_what_is_damaged_is_answered_again(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    answered(output, [1, 2, 3], 3)
    lines = journal_of(output).read_bytes().splitlines(keepends=True)
    lines[2] = b"\0" * len(lines[2][:-1]) + b"\n"
    journal_of(output).write_bytes(b"".join(lines))
    assert answered(output, [], 3) == {1}


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out.jsonl"

    class Full:
        """A file that takes ten more bytes."""

        def __init__(self, file: Any) -> None:
            self._file, self._room = file, 10

        def seek(self, *where: int) -> int:
            return int(self._file.seek(*where))

        def write(self, content: memoryview) -> int:
            if not self._room:
                raise OSError(28, "No space left on device")
            taken = content[: self._room]
            self._room -= len(taken)
            return int(self._file.write(taken))

    with pytest.raises(OSError, match="No space"), answer_file(output, 2, IDENTITY) as answers:
        answers.add(1, {"text": "a"})
        answers._journal = Full(answers._journal)  # type: ignore[assignment]
        answers.add(2, {"text": "b" * 100})
    assert answered(output, [2], 2) == {1}
    assert len(read(journal_of(output))) == 3


def test_another_input_is_refused(tmp_path: Path) -> None:
    answered(tmp_path / "out.jsonl", [1], 1)
    refused = pytest.raises(ConfigError, match="delete that to begin anew")
    with refused, answer_file(tmp_path / "out.jsonl", 1, {"input_sha256": "1"}):
        pass


def test_lines_have_the_numbers_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf1\n\n  \n2\r\n3")
    assert list(read_lines(path)) == [(1, b"1\n"), (4, b"2\r\n"), (5, b"3")]


@pytest.mark.skipif(os.name == "nt", reason="there is no SIGKILL on Windows")
def test_killed_at_random_moments_it_loses_no_line(package: Path, tmp_path: Path) -> None:
    lines = [{"prompt": f"hello {i}", "max_new_tokens": 2 + i % 40} for i in range(120)]
    source = write(tmp_path / "in.jsonl", *lines[:60], b"{torn", *lines[60:])
    output, undisturbed = tmp_path / "out.jsonl", tmp_path / "undisturbed.jsonl"
    assert run(package, source, undisturbed) == cli.EXIT_FAILED
    command = [sys.executable, "-m", "headrace.runtime.cli", "run", str(package), *GREEDY]
    command += ["--input", str(source), "--output", str(output)]
    chance, kills, journal = random.Random(7), 0, journal_of(output)
    while not output.exists():
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            before = journal.stat().st_size if journal.exists() else 0
            while process.poll() is None and (
                not journal.exists() or journal.stat().st_size <= before
            ):
                time.sleep(0.001)
            time.sleep(chance.random() * 0.1)  # somewhere among the answers
            if process.poll() is None and kills < 3:
                process.send_signal(signal.SIGKILL)
                kills += 1
            else:
                process.wait()
    assert kills
    assert output.read_bytes() == undisturbed.read_bytes()
    assert not journal.exists()


@pytest.mark.skipif(os.name == "nt", reason="there are no such signals on Windows")
def test_an_interrupted_run_says_how_to_go_on(package: Path, tmp_path: Path) -> None:
    lines = [{"prompt": f"hello {i}", "max_new_tokens": 400} for i in range(64)]
    source = write(tmp_path / "in.jsonl", {"prompt": "hello"}, *lines)
    output = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "headrace.runtime.cli", "run", str(package)]
    command += ["--input", str(source), "--output", str(output), "--temperature", "9"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        journal = journal_of(output)
        while not journal.exists() or journal.read_bytes().count(b"\n") < 2:
            time.sleep(0.01)
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        errors = process.stderr.read()
    assert process.returncode == cli.EXIT_INTERRUPTED
    assert "and the same command goes on" in errors
    assert "Traceback" not in errors
