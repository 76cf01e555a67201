"""Every command that the documentation shows runs, or is in `ELSEWHERE` with the reason."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_samples import write_gguf
from docs_snippets import commands, mentions
from package_fixtures import PackageMaker

from headrace.exporters import cli as exporter
from headrace.runtime import cli
from headrace.runtime.store.places import HOME_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    "README.md",
    "docs/embedding.md",
    "docs/guide.md",
    "docs/measurements.md",
    "docs/server.md",
    "examples/desktop_chat/README.md",
]
MENTIONING = [*PAGES, "CONTRIBUTING.md", "docs/architecture.md"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
PROGRAMS: dict[str, Callable[[list[str]], int]] = {
    "headrace": cli.main,
    "runtime-export": exporter.main,
}
ELSEWHERE = {
    "python3 tools/dev.py demo": "exports the real checkpoint, for minutes",
    "python3 tools/dev.py test": "it runs this test",
    "pip install pyinstaller": "needs the network",
    "pip install opentelemetry-distro opentelemetry-exporter-otlp": "needs the network",
    "opentelemetry-instrument headrace serve smollm2": "needs these; spans: test_server_tracing.py",
    "python chat.py PACKAGE": "run by test_desktop_chat.py",
    "pyinstaller chat.spec": "run by test_desktop_chat.py",
    "dist/chat/chat PACKAGE": "run by test_desktop_chat.py",
}


@pytest.mark.parametrize("page", PAGES)
def test_every_command_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_package: PackageMaker
) -> None:
    """One after the other, as a reader would, in a folder that has what they name."""
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for name in ("smollm2.gguf", "SmolLM2-135M-Instruct.Q4_1.gguf"):
        file = write_gguf(tmp_path / name, tokenizer__chat_template=TEMPLATE)
    Path("prompts.jsonl").write_text(json.dumps({"prompt": "hello", "max_new_tokens": 2}) + "\n")
    for words in commands(ROOT / page):
        if " ".join(words) in ELSEWHERE:
            continue
        args = [file.as_uri() if word.startswith("file:") else word for word in words]
        if words[:2] == ["pip", "install"]:
            assert_extras_exist(*words[2:])
        elif words[:2] == ["headrace", "serve"]:
            for number, model in enumerate(words[2:]):
                shutil.copytree(tiny_package("fp32", seed=number), model)  # its name is the model's
            serve(args[1:])
        else:
            assert PROGRAMS[args[0]](args[1:]) == 0, args
    if page == "docs/guide.md":
        assert json.loads(Path("answers.jsonl").read_text())["line"] == 1


@pytest.mark.parametrize("page", MENTIONING)
def test_options_that_are_named_exist(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command, code in mentions(ROOT / page):
        program, *words = command.split()
        sub = words[:1] if words and re.fullmatch("[a-z][a-z-]*", words[0]) else []
        with pytest.raises(SystemExit) as ended:
            PROGRAMS[program]([*sub, "--help"])
        assert ended.value.code == 0
        known = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", capsys.readouterr().out))
        assert set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", code)) <= known, command


def test_what_runs_elsewhere_is_shown() -> None:
    shown = {" ".join(words) for page in PAGES for words in commands(ROOT / page)}
    assert ELSEWHERE.keys() <= shown
    assert len(shown) > 20


def serve(args: list[str]) -> None:
    """Start it, on any free port, and end it once it is ready."""
    command = [sys.executable, "-m", "headrace.runtime.cli", *args, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert any("ready at http://127.0.0.1:" in line for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        _, written = process.communicate(timeout=120)
        assert (process.returncode, written) == (0, "")
    finally:
        process.kill()


def assert_extras_exist(*requirements: str) -> None:
    """What would be installed is this project with extras that it has; nothing is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for requirement in requirements:
        found = re.fullmatch(r"headrace\[([a-z,]+)\]", requirement)
        assert found, requirement
        assert set(found[1].split(",")) <= project["optional-dependencies"].keys()
