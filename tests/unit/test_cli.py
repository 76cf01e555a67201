"""The command line on a tiny real package: what it prints, and the exit code of every mistake."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.runtime import Runtime, cli
from headrace.runtime.commands import chat
from headrace.runtime.completion import TokenDelta
from headrace.runtime.config import PRESETS

GREEDY = ["--max-new-tokens", "8", "--temperature", "0"]


@pytest.fixture(scope="module")
def package(tiny_package: Callable[..., Path]) -> Path:
    return tiny_package("fp32")


def headrace(*args: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "headrace.runtime.cli", *args]
    return subprocess.run(command, input=text, capture_output=True, encoding="utf-8", timeout=60)


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Standard input of the commands that run in this process."""
    stream = io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stream)


def test_run_prints_what_the_library_says(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", str(package), "hello", *GREEDY]) == 0
    printed = capsys.readouterr()
    with Runtime.load(package) as runtime:
        message = {"role": "user", "content": "hello"}
        completion = runtime.chat([message], max_new_tokens=8, temperature=0)
        assert (printed.out, printed.err) == (completion.text + "\n", "")
        raw = runtime.generate("hello", max_new_tokens=8, temperature=0)
    assert cli.main(["run", str(package), "hello", "--raw", *GREEDY]) == 0
    assert capsys.readouterr().out == raw.text + "\n"
    assert raw.text != completion.text


def test_run_as_json(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", str(package), "hello", "--json", *GREEDY]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["completion_tokens"] == len(answer["token_ids"]) == len(answer["entropy_nats"])
    assert answer["finish_reason"] in ("stop", "length")


def test_a_draft_model_changes_no_answer(
    package: Path, tiny_package: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", str(package), "hello", *GREEDY]) == 0
    expected = capsys.readouterr().out
    assert cli.main(["run", str(package), "hello", *GREEDY, "--draft", str(package)]) == 0
    assert capsys.readouterr().out == expected
    other = str(tiny_package("fp32", vocab=320))
    assert cli.main(["run", str(package), "hello", *GREEDY, "--draft", other]) == 1
    assert "cannot draft for" in capsys.readouterr().err


def test_run_reads_standard_input(
    package: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["run", str(package), "hello\nyou", *GREEDY]) == 0
    expected = capsys.readouterr().out
    type_in(monkeypatch, "hello\nyou\n")
    assert cli.main(["run", str(package), "-", *GREEDY]) == 0
    assert capsys.readouterr().out == expected


def test_sampling_options_reach_the_request(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*options: str) -> str:
        command = ["run", str(package), "hello", "--max-new-tokens", "12", *options]
        assert cli.main(command) == 0
        return capsys.readouterr().out

    warm = ["--temperature", "5", "--top-k", "200", "--top-p", "1", "--min-p", "0"]
    assert run(*warm, "--seed", "1") == run(*warm, "--seed", "1")
    assert run(*warm, "--seed", "1") != run(*warm, "--seed", "2")
    assert run("--temperature", "5", "--top-k", "1") == run("--temperature", "0")
    whole = run("--temperature", "0").rstrip("\n")
    assert (
        run("--temperature", "0", "--stop", whole[2:5]) == whole[: whole.index(whole[2:5])] + "\n"
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_answer_alike(
    package: Path, capsys: pytest.CaptureFixture[str], preset: str
) -> None:
    answer = ["run", str(package), "hello", "--raw", "--max-new-tokens", "8"]
    assert cli.main(answer) == 0
    plain = capsys.readouterr().out
    assert cli.main([*answer, "--preset", preset, "--max-draft-tokens", "2"]) == 0
    assert capsys.readouterr().out == plain


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--temperature", "nan"], "temperature=nan"),
        (["--top-p", "2"], "top_p=2.0"),
        (["--max-new-tokens", "0"], "max_new_tokens=0"),
        (["--stop", ""], "stop="),
        (["--threads", "0"], "num_threads=0"),
        (["--device", "gpu"], "device='gpu'"),
        (["--target", "nothing"], "target='nothing'"),
        (["--preset", "fast"], "preset='fast'"),
        (["--preset", "latency", "--pipeline-depth", "13"], "pipeline_depth=13"),
        (["--stages", "2"], "stages=2"),
        (["--micro-batches", "2"], "micro_batches=2"),
        (["--raw", "--system", "Be brief."], "--system"),
        (["--input", "lines.jsonl", "--output", "answers.jsonl"], "PROMPT='hello'"),
        (["--output", "answers.jsonl"], "--input FILE and --output FILE together"),
    ],
)
def test_values_out_of_range_are_wrong_usage(
    package: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert cli.main(["run", str(package), "hello", *options]) == cli.EXIT_USAGE
    printed = capsys.readouterr()
    assert message in printed.err
    assert (printed.out, printed.err.count("\n")) == ("", 1)


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["fly"],
        ["run"],
        ["run", "DIR", "hello", "--top-k", "many"],
        ["bench", "DIR", "--batch", "1,x"],
        ["bench", "DIR", "--batch", "0"],
        ["inspect", "DIR", "--wrong"],
    ],
)
def test_wrong_usage_is_explained(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(args)
    assert end.value.code == cli.EXIT_USAGE
    assert "usage: headrace" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "{package}", ""], "prompt is empty"),
        (["run", "{package}", "word " * 600, "--raw"], "the context holds 512"),
        (["run", "{package}", "\udcff", "--raw"], ""),
        (["run", "{nothing}", "hello"], "not a headrace package"),
        (["chat", "{nothing}"], "not a headrace package"),
        (["bench", "{nothing}"], "not a headrace package"),
        (["inspect", "{nothing}"], "not a headrace package"),
        (["bench", "{package}", "--batch", "1", "--prompt-tokens", "500"], "exceed the context"),
    ],
)
def test_failures_are_one_line(
    package: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    message: str,
) -> None:
    if args[:3] == ["run", "{package}", ""]:
        args = [*args, "--raw"]
    places = {"{package}": str(package), "{nothing}": str(tmp_path)}
    assert cli.main([places.get(arg, arg) for arg in args]) == cli.EXIT_FAILED
    printed = capsys.readouterr()
    assert message in printed.err
    assert (printed.out, printed.err.count("\n")) == ("", 1)


def test_standard_input_must_be_text(
    package: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"\xff\xfe")))
    assert cli.main(["run", str(package), "-"]) == cli.EXIT_FAILED
    assert "not UTF-8" in capsys.readouterr().err


def test_chat_is_a_conversation(
    package: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    type_in(monkeypatch, "hello\n\nhello\n/stats\n/reset\nhello\n/what\n/quit\nnever\n")
    assert cli.main(["chat", str(package), *GREEDY]) == 0
    printed = capsys.readouterr()
    with Runtime.load(package) as runtime:
        conversation = [{"role": "user", "content": "hello"}]
        first = runtime.chat(conversation, max_new_tokens=8, temperature=0).text
        conversation += [{"role": "assistant", "content": first}, conversation[0]]
        second = runtime.chat(conversation, max_new_tokens=8, temperature=0).text
    assert printed.out == f"{first}\n{second}\n{first}\n"
    assert "tokens/s" in printed.err
    assert chat.HELP in printed.err


def test_chat_goes_on_after_a_turn_that_is_too_long(
    package: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    type_in(monkeypatch, "word " * 600 + "\nhello\n")
    assert cli.main(["chat", str(package), *GREEDY]) == 0
    printed = capsys.readouterr()
    assert "the context holds 512" in printed.err
    assert printed.out.endswith("\n")
    assert len(printed.out) > 1


def test_interrupting_an_answer_keeps_the_conversation(
    package: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Runtime.load(package) as runtime:
        asked: list[Any] = []
        answer = runtime.chat

        def interrupted(messages: Any, **options: Any) -> Iterator[TokenDelta]:
            asked.append([message["role"] for message in messages])
            deltas = answer(messages, **options)
            yield next(delta for delta in deltas if delta.text)
            raise KeyboardInterrupt

        monkeypatch.setattr(runtime, "chat", interrupted)
        conversation = chat.Conversation(runtime, "Be brief.", {"max_new_tokens": 40})
        conversation.ask("hello")
        conversation.ask("go on")
    assert asked == [["system", "user"], ["system", "user", "assistant", "user"]]
    assert "[interrupted]" in capsys.readouterr().err


def test_inspect(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(package), "--verify"]) == 0
    text = capsys.readouterr().out
    assert "2 layers" in text
    assert "all hashes match" in text
    assert cli.main(["inspect", str(package), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    target = summary["targets"][0]
    assert sum(share["bytes"] for share in target["formats"].values()) <= target["weight_bytes"]
    assert target["kv_cache"] == {
        "dtype": "float32",
        "bytes_per_token": 2 * 2 * 2 * 16 * 4,
        "block_tokens": None,
    }
    against = target["against_fp16"]
    assert against["kv_tokens"] == 512  # the context
    assert against["bytes"] == target["weight_bytes"] + 512 * 2 * 2 * 2 * 16 * 4
    assert -1.5 < against["saved_share"] < -0.9  # float32 takes twice as much


def test_inspect_finds_a_changed_byte(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in package.rglob("*"):
        if path.is_file():
            copy = tmp_path / path.relative_to(package)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    weights = next(tmp_path.rglob("weights.bin"))
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    assert cli.main(["inspect", str(tmp_path)]) == 0
    assert cli.main(["inspect", str(tmp_path), "--verify"]) == cli.EXIT_FAILED
    assert "weights.bin was changed" in capsys.readouterr().err


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    assert "onnxruntime" in capsys.readouterr().out
    assert cli.main(["doctor", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) > 3


def test_bench(tiny_package: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    package = tiny_package("fp32", context=4096)
    command = ["bench", str(package), "--batch", "1,3", "--prompt-tokens", "5"]
    assert cli.main([*command, "--new-tokens", "400", "--repeat", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [b["batch"] for b in report["batches"]] == [1, 3]
    assert list(report["step_ms_by_rows"]) == [str(n) for n in range(1, 33)]
    positive = [report["prefill_tok_s"], report["peak_rss_bytes"], report["model_busy_share"]]
    positive += [b["decode_tok_s"] for b in report["batches"]]
    assert min(positive + list(report["step_ms_by_rows"].values())) > 0
    # One of many steps may be half over at the start, and be one that the system held up.
    assert report["model_busy_share"] < 1.5
    assert {"headrace", "onnxruntime"} <= report["versions"].keys()
    assert report["hardware"]["features"] is not None


def test_version_and_help_need_no_package() -> None:
    assert headrace("--version").stdout.startswith("headrace 0")
    for command in ("run", "chat", "bench", "doctor", "inspect"):
        assert command in headrace("--help").stdout


@pytest.mark.skipif(os.name == "nt", reason="there are no such pipes and signals on Windows")
def test_a_reader_that_leaves_is_no_error(package: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "headrace.runtime.cli", "inspect", str(package)]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (cli.EXIT_PIPE_CLOSED, b"")


@pytest.mark.skipif(os.name == "nt", reason="there are no such pipes and signals on Windows")
def test_an_interrupt_ends_the_run(package: Path) -> None:
    command = [sys.executable, "-m", "headrace.runtime.cli", "run", str(package), "hello", "--raw"]
    sampled = ["--temperature", "9", "--max-new-tokens", "500"]
    with subprocess.Popen(
        [*command, *sampled], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)  # it answers
        process.send_signal(signal.SIGINT)
        code, errors = process.wait(30), process.stderr.read()
    assert b"Traceback" not in errors
    assert code in (cli.EXIT_INTERRUPTED, 0)  # 0: it was already done
