"""What can be wrong with `--qat` is said in one line before work starts. Needs no torch."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.exporters import cli, package
from headrace.exporters.options import ExportOptions
from headrace.exporters.precision import Rule
from headrace.exporters.qat import Recipe
from headrace.runtime.errors import ConfigError

LONG_TEXT = "Rivers that run to the north. " * 1000


@pytest.fixture
def run(
    tmp_path: Path,
    tiny_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., str]:
    """`run(text)` exports with this text to train on and returns what the command complains of."""

    def no_work(*_: Any) -> None:
        raise AssertionError("work has started")

    monkeypatch.setattr(package, "calibrate", no_work)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: found("json" if name == "torch" else name)
    )

    def export(text: str | bytes, *options: str, code: int = 2) -> str:
        file = tmp_path / "text.txt"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        given = ["-o", str(tmp_path / "out"), "-p", "int4", "--qat", str(file), *options]
        assert cli.main([str(tiny_checkpoint()), *given]) == code
        complaint = capsys.readouterr().err
        assert complaint.count("\n") == 1
        assert not (tmp_path / "out").exists()
        return complaint

    return export


def test_torch_is_missing(run: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else found(name)
    )
    assert "--qat needs torch" in run(LONG_TEXT, code=1)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "this file is empty"),
        (" \n", "this file is empty"),
        (b"\x80\xff", "a UTF-8 text"),
        ("a\0b", "binary"),
        ("too short", "at least 4096 tokens"),
    ],
)
def test_texts_that_nothing_can_be_learned_from(
    text: str | bytes, complaint: str, run: Callable[..., str]
) -> None:
    assert complaint in run(text)


@pytest.mark.parametrize("precision", ["fp32", "keep"])
def test_precisions_without_rounding(precision: str, run: Callable[..., str]) -> None:
    complaint = run(LONG_TEXT, "-p", precision)
    assert "rounds weights to 4 or 8 bits: w8a8_row, auto, int4" in complaint


def test_options_that_exclude_each_other(run: Callable[..., str]) -> None:
    assert "--qat no rule" in run(LONG_TEXT, "--rule", "*.down_proj=keep")
    assert "calibration, which qat needs" in run(LONG_TEXT, "-p", "w8a8_row", "--no-calibration")
    assert "a number of steps above 0" in run(LONG_TEXT, "--qat-steps", "0")
    with pytest.raises(ConfigError, match="rule"):
        ExportOptions(qat_text=LONG_TEXT, rules=[Rule("*", "keep")]).check()


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        ("", "delete"),
        ("[]", "delete"),
        ('{"step": 1}', "delete"),
        ({"identity": {}}, "its checkpoint is another"),
        ({"identity": {"checkpoint": "another"}}, "its checkpoint is another"),
    ],
)
def test_state_of_another_training(
    state: str | dict[str, Any], complaint: str, run: Callable[..., str], tmp_path: Path
) -> None:
    if isinstance(state, dict):
        whole = {"step": 1, "tensors": "x", "train": [], "held_out": []} | state
        state = json.dumps(whole)
    folder = tmp_path / "out.qat"
    folder.mkdir()
    (folder / "state.json").write_text(state, encoding="utf-8")
    assert complaint in run(LONG_TEXT)
    assert (folder / "state.json").read_text(encoding="utf-8") == state


def test_rate_rises_then_falls_to_almost_nothing() -> None:
    recipe = Recipe(steps=100, sequence_tokens=256)
    rates = [recipe.rate(step) for step in range(100)]
    peak = rates.index(max(rates))
    assert 5 <= peak <= 15 and rates[peak] == recipe.learning_rate
    assert rates[:peak] == sorted(rates[:peak]) and rates[0] > 0
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert 0 < rates[-1] < 0.02 * recipe.learning_rate
    assert Recipe(steps=1, sequence_tokens=256).rate(0) == recipe.learning_rate
