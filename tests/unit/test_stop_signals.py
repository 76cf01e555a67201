"""An export that is asked to stop leaves nothing behind, wherever it is at that moment."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.exporters import cli, package

FAST = ["--precision", "w8a8_row", "--kv-cache", "fp32"]


@pytest.mark.skipif(os.name == "nt", reason="Windows ends a process without telling it")
def test_a_terminated_export_cleans_up(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "check_graph", lambda *_: signal.raise_signal(signal.SIGTERM))
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        cli.main([str(tiny_checkpoint(layers=1)), "-o", str(tmp_path / "out" / "tiny"), *FAST])
    assert end.value.code == 143
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
def test_an_interrupt_amid_a_destructor_is_heard(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    quiet: list[str],
) -> None:
    class Destroyed:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(package, "check_graph", lambda *_: Destroyed() and None)
    output = tmp_path / "out" / "tiny"
    assert cli.main([str(tiny_checkpoint(layers=1)), "-o", str(output), *FAST, *quiet]) == 130
    assert "nothing was written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
