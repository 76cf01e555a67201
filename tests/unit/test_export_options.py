"""Options of the exporter that would do nothing are refused before work starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.exporters import cli


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--rule", "*.nothing=fp32"], "expected a pattern that matches a weight, such as model."),
        (["--rule", "*norm*=fp32"], "expected a pattern that matches a weight"),
        (["--rule", "[=fp32"], "expected a pattern that matches a weight"),
        (["--qat-steps", "7"], "--qat beside it"),
        (["--target", "cuda_fp16", "--stages", "2"], "cpu, too, which stages is about"),
        (["--target", "cuda_fp16", "--rule", "*=fp32"], "cpu, too, which rule is about"),
    ],
)
def test_options_without_effect(
    options: list[str],
    complaint: str,
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "new" / "package"
    assert cli.main([str(tiny_checkpoint()), "-o", str(output), *options]) == 2
    printed = capsys.readouterr()
    assert complaint in printed.err
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert not output.parent.exists()
