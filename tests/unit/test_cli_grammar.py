"""Options of `headrace run` for the form of an answer, refused before a model is loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.runtime.cli import EXIT_USAGE
from headrace.runtime.cli import main as run_command


@pytest.mark.parametrize(
    ("option", "content", "reason"),
    [
        ("--json-schema", None, "can be read"),
        ("--json-schema", "{", "JSON schema"),
        ("--json-schema", "[1]", "object"),
        ("--json-schema", "", "empty"),
        ("--grammar", None, "can be read"),
        ("--grammar", "start: " + '"a" ' * 20_000, "at most 65536 bytes"),
    ],
)
def test_a_bad_file_is_named(
    option: str,
    content: str | None,
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "form"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    assert run_command(["run", str(tmp_path), "x", option, str(path)]) == EXIT_USAGE
    message = capsys.readouterr().err
    assert reason in message and message.count("\n") == 1


def test_only_one_form_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_command(["run", str(tmp_path), "x", "--regex", "a", "--grammar", "b"])
    assert "not allowed with" in capsys.readouterr().err


def test_a_missing_library_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert run_command(["run", str(tmp_path), "x", "--regex", "a"]) == EXIT_USAGE
    assert 'pip install "headrace[grammar]"' in capsys.readouterr().err
