"""What a wheel carries besides Python files."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_data_file_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    setuptools = settings["tool"]["setuptools"]
    folders = {name: ROOT / path for name, path in setuptools["package-dir"].items()}
    patterns = setuptools["package-data"]
    for name, folder in folders.items():
        listed = {path for pattern in patterns.get(name, []) for path in folder.glob(pattern)}
        for path in folder.rglob("*"):
            inner = [other for other in folders.values() if other != folder]
            if path.is_dir() or path.suffix in (".py", ".pyc") or path in listed:
                continue
            assert any(path.is_relative_to(other) for other in inner), f"{path} is in no wheel"
