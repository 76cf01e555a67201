"""Static checks: ruff (lint and format) and mypy. Fast; run before every commit.

mypy does not follow the editable mapping of folders to `headrace.*`, so it is given a link.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = ROOT / ".typing" / "headrace"
PACKAGES = ("runtime", "backends", "exporters")


def main() -> int:
    checks = {
        "ruff check": ["ruff", "check", "."],
        "ruff format": ["ruff", "format", "--check", "."],
        "mypy": ["mypy", *(str(LINK / name) for name in PACKAGES)],
        "mypy tools": ["mypy", "tools"],
    }
    LINK.parent.mkdir(exist_ok=True)
    if not LINK.is_symlink():
        LINK.symlink_to(ROOT, target_is_directory=True)
    environment = {**os.environ, "MYPYPATH": str(LINK.parent)}
    failed = [name for name, command in checks.items() if _run(name, command, environment)]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _run(name: str, command: list[str], environment: dict[str, str]) -> int:
    print(f"{name}: ", end="", flush=True)
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=environment, check=False
    ).returncode


if __name__ == "__main__":
    raise SystemExit(main())
