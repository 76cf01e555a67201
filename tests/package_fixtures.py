"""Packages that tests share, each exported once a session; loaded by tests/conftest.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock
from smollm2 import require_checkpoint
from tiny import write_tiny_llama

from headrace.exporters.package import export_package

PackageMaker = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make(**options)` of `tiny.write_tiny_llama`, remembered by its options."""
    made: dict[str, Path] = {}

    def make(**options: object) -> Path:
        key = repr(sorted(options.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
            made[key] = write_tiny_llama(folder, **options)  # type: ignore[arg-type]
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_package(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> PackageMaker:
    """`make(precision, kv_cache, forms=..., **checkpoint options)`, remembered by its options."""
    made: dict[str, Path] = {}

    def make(
        precision: str,
        kv_cache: str = "fp32",
        forms: tuple[str, ...] = ("ragged", "uniform", "tree"),
        calibrate: bool = True,
        **options: object,
    ) -> Path:
        key = repr((precision, kv_cache, forms, calibrate, sorted(options.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp("package") / "tiny"
            source = tiny_checkpoint(**options)
            export_package(
                source,
                folder,
                precision=precision,
                kv_cache=kv_cache,
                forms=forms,
                calibrate=calibrate,
            )
            made[key] = folder
        return made[key]

    return make


@pytest.fixture(scope="session")
def smollm2_package(tmp_path_factory: pytest.TempPathFactory) -> PackageMaker:
    """`make(precision, kv_cache)` from the real checkpoint; skips where it is not installed.

    Worker processes share what one of them has exported.
    """
    shared = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        shared = shared.parent

    def make(precision: str, kv_cache: str) -> Path:
        folder = shared / f"smollm2-{precision}-{kv_cache}"
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                export_package(require_checkpoint(), folder, precision=precision, kv_cache=kv_cache)
        return folder

    return make
