"""The rules that a machine can check: style, format, types, import directions.

Runs in the environment that `tools/dev.py` makes (`python3 tools/dev.py check`), locally and in
CI alike. `--fix` repairs what ruff can repair.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TYPING = ROOT / ".typing"
CHECKED = ("runtime", "backends", "exporters", "tools", "tests", "examples")
# Tests and benchmarks import their helpers by plain names.
MYPYPATH = (".typing", "tests", "tests/arch", "tests/unit", "tools", "tools/bench")


def main() -> int:
    """0 if every check passes; all of them run."""
    parser = argparse.ArgumentParser(prog="check.py", description=__doc__)
    parser.add_argument("--fix", action="store_true", help="let ruff repair and format")
    fix = parser.parse_args().fix
    missing = [name for name in ("ruff", "mypy", "pytest") if not importlib.util.find_spec(name)]
    if missing:
        print(f"check.py: {missing[0]} is missing; run python3 tools/dev.py check", file=sys.stderr)
        return 1
    folders = [f".typing/headrace/{name}" for name in CHECKED]
    link_namespace()
    results = [
        run("ruff", ["ruff", "check", *(["--fix"] if fix else []), "."]),
        run("format", ["ruff", "format", *([] if fix else ["--check"]), "."]),
        run("mypy", ["mypy", *folders]),
        run("architecture", ["pytest", "-q", "tests/arch"]),
    ]
    return 0 if all(results) else 1


def link_namespace() -> None:
    """Make `.typing/headrace` a link to this checkout.

    mypy does not follow the mapping of folders to `headrace.*` of an editable install.
    """
    TYPING.mkdir(exist_ok=True)
    link = TYPING / "headrace"
    if link.exists():
        return
    try:
        link.symlink_to(os.pardir, target_is_directory=True)
    except OSError:  # Windows without the right to make symbolic links; junctions need none
        subprocess.run(["cmd", "/c", "mklink", "/J", str(link), str(ROOT)], check=True)


def run(title: str, module_args: Sequence[str]) -> bool:
    """Run `python -m ...`; its output is shown where it fails."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", *module_args],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": os.pathsep.join(MYPYPATH)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    verdict = "ok" if done.returncode == 0 else "FAILED"
    print(f"  {title:13} {verdict} ({time.monotonic() - start:.1f} s)", flush=True)
    if done.returncode:
        print(done.stdout.rstrip(), flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    raise SystemExit(main())
