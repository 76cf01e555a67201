"""The one import of onnxruntime: telemetry is off before it happens, and errors name a remedy."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.backends.ort_import import TELEMETRY_VARIABLE, load_onnxruntime
from headrace.runtime.errors import BackendUnavailableError

# Stands in for onnxruntime: remembers the environment that it was imported in.
MODULE = f"""
import os
seen = os.environ.get("{TELEMETRY_VARIABLE}")
calls = []
InferenceSession = object
def disable_telemetry_events():
    calls.append("disabled")
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where `import onnxruntime` looks first, in a process that has not imported it."""
    monkeypatch.delitem(sys.modules, "onnxruntime", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(TELEMETRY_VARIABLE, "")  # so that what comes after is undone
    monkeypatch.delenv(TELEMETRY_VARIABLE)
    yield tmp_path
    sys.modules.pop("onnxruntime", None)  # monkeypatch puts the real one back


def test_telemetry_is_off_before_the_import(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "onnxruntime.py").write_text(MODULE)
    loaded = load_onnxruntime()
    assert loaded.seen == "1"
    assert loaded.calls == ["disabled"]
    assert load_onnxruntime() is loaded
    assert caplog.records == []


def test_the_hosts_choice_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "onnxruntime.py").write_text(MODULE)
    monkeypatch.setenv(TELEMETRY_VARIABLE, "0")
    assert load_onnxruntime().seen == "0"


def test_an_earlier_import_is_too_late_to_switch_it_off(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "onnxruntime.py").write_text(MODULE)
    __import__("onnxruntime")
    with caplog.at_level(logging.WARNING):
        load_onnxruntime()
        load_onnxruntime()
    (record,) = caplog.records
    assert f"set {TELEMETRY_VARIABLE}=1 before that import" in record.getMessage()


def test_not_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(BackendUnavailableError, match=r"pip install headrace\[cpu\]"):
        load_onnxruntime()


def test_a_folder_left_behind_by_an_uninstall(folder: Path) -> None:
    (folder / "onnxruntime").mkdir()
    (folder / "onnxruntime" / "__init__.py").write_text("")
    with pytest.raises(BackendUnavailableError, match="incomplete; pip install --force-reinstall"):
        load_onnxruntime()
