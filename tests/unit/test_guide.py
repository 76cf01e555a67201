"""The commands of docs/guide.md run, and the messages it explains are ones that we raise."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_samples import write_gguf
from sources_of_guide import raised_text
from timeline import draw

from headrace.exporters import cli as exporter
from headrace.runtime import cli
from headrace.runtime.core import LaneRecord, RowRecord
from headrace.runtime.store.places import HOME_VARIABLE

GUIDE = (Path(__file__).parents[2] / "docs" / "guide.md").read_text(encoding="utf-8")
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
PROGRAMS: dict[str, Callable[[list[str]], int]] = {
    "headrace": cli.main,
    "runtime-export": exporter.main,
}


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


def test_every_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    file = write_gguf(tmp_path / "smollm2.gguf", tokenizer__chat_template=TEMPLATE)
    Path("prompts.jsonl").write_text(json.dumps({"prompt": "hello", "max_new_tokens": 2}) + "\n")
    found = commands()
    assert len(found) > 8
    for program, *words in found:
        args = [file.as_uri() if word.startswith("file:") else word for word in words]
        assert PROGRAMS[program](args) == 0, [program, *args]
    assert json.loads(Path("answers.jsonl").read_text())["line"] == 1


def test_every_message_is_raised_somewhere() -> None:
    table = GUIDE.split("## When something fails")[1]
    messages = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    assert len(messages) > 8
    text = raised_text()
    assert not [message for message in messages if message not in text]


def test_a_timeline_has_a_box_for_each_row() -> None:
    rows = (RowRecord(3, 1, 9, 0, 0, True), RowRecord(5, 2, 4, 3, 2, False))
    picture = draw([LaneRecord(1, 1.0, 10.0, rows), LaneRecord(2, 1.02, 10.0, rows[1:])])
    assert [picture.count(f'fill="{c}"') for c in ("#8c8c8c", "#f58518", "#4c78a8")] == [2, 3, 1]
    assert "lane 4" in picture
    assert "30 ms" in picture
