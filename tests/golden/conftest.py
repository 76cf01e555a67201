"""Packages of the real checkpoint, exported once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from smollm2 import require_checkpoint

from headrace.exporters.package import export_package


@pytest.fixture(scope="session")
def smollm2_package(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """`make(precision, kv_cache)`: the folder of such a package."""
    made: dict[tuple[str, str], Path] = {}

    def make(precision: str, kv_cache: str) -> Path:
        key = (precision, kv_cache)
        if key not in made:
            output = tmp_path_factory.mktemp("smollm2") / f"{precision}_{kv_cache}"
            export_package(require_checkpoint(), output, precision=precision, kv_cache=kv_cache)
            made[key] = output
        return made[key]

    return make
