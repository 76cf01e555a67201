"""For PyInstaller, which finds the hooks in this folder by an entry point of the package."""

from __future__ import annotations

from pathlib import Path


def hook_dirs() -> list[str]:
    return [str(Path(__file__).parent)]
