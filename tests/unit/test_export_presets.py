"""What `runtime-export --preset` stands for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.exporters import cli
from headrace.exporters.options import PRESETS
from headrace.runtime import config
from headrace.runtime.manifest import read_manifest


def test_names_are_those_of_the_engine() -> None:
    assert PRESETS.keys() <= config.PRESETS.keys()


@pytest.mark.parametrize(
    ("options", "precision", "cache"),
    [([], "int4", "int8"), (["-p", "w8a8_row", "--kv-cache", "fp32"], "w8a8_row", "float32")],
)
def test_low_memory(
    options: list[str],
    precision: str,
    cache: str,
    tmp_path: Path,
    tiny_checkpoint: Callable[..., Path],
) -> None:
    """Options that are given go before it."""
    source, output = tiny_checkpoint(), tmp_path / "p"
    command = [str(source), "-o", str(output), "--preset", "low-memory", "-q"]
    assert cli.main([*command, "--form", "ragged", *options]) == 0
    (target,) = read_manifest(output).targets
    assert (target.precision, target.kv_cache.dtype) == (precision, cache)
