"""One virtual environment for each peer below `.cache/peers`, made once for its pins and this CPU.

A source build is tuned to the CPU that it runs on (-march=native), so the stamp of such an
environment names the CPU too.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import venv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from peers.machine import Machine
from peers.specs import Environment

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".cache" / "peers"
_HEADRACE_PINS = ROOT / "tools" / "constraints.txt"
_HEARTBEAT_S = 20.0

Say = Callable[[str], None]
Command = Sequence[str | Path]


class PeerError(Exception):
    """A peer cannot be installed or does not answer; the message is the table's."""


def python_of(environment: Environment) -> Path:
    folder = FOLDER / environment.name / "venv"
    return folder / "Scripts" / "python.exe" if os.name == "nt" else folder / "bin" / "python"


def log_of(environment: Environment) -> Path:
    return FOLDER / environment.name / "setup.log"


def ensure(
    environment: Environment, machine: Machine, say: Say, *, without_amx: bool = False
) -> None:
    """Make the environment unless it is there.

    Args:
        without_amx: build `source` with the flags of that name, from now on and in later runs.

    Raises:
        PeerError: a command failed; what it printed is in the log.
    """
    stamp = _read_stamp(environment)
    wanted = {"pins": _pins_digest(environment, machine), "without_amx": without_amx}
    if environment.holds_headrace:
        wanted["project"] = _digest([(ROOT / "pyproject.toml").read_text("utf-8")])
    has_pins = stamp.get("pins") == wanted["pins"]
    if has_pins and not without_amx:
        wanted["without_amx"] = bool(stamp.get("without_amx"))
    if stamp == wanted:
        return
    stamp_path = FOLDER / environment.name / "stamp.json"
    stamp_path.unlink(missing_ok=True)
    if not has_pins:
        say(f"{environment.name}: making its environment: {', '.join(_content(environment))}")
        _make_venv(environment)
        _install_wheels(environment, say)
    if environment.holds_headrace:
        checkout: list[str | Path] = ["--no-build-isolation", "-e", ROOT]
        _pip(environment, say, "installing this checkout", checkout)
    if environment.source:
        _build(environment, say, environment.without_amx if without_amx else "")
    stamp_path.write_text(json.dumps(wanted), encoding="utf-8")


def was_built_without_amx(environment: Environment) -> bool:
    return bool(_read_stamp(environment).get("without_amx"))


def _content(environment: Environment) -> list[str]:
    """What is installed, for the reader."""
    headrace = ["this checkout", "tools/constraints.txt"] if environment.holds_headrace else []
    return [*environment.wheels, *filter(None, [environment.source]), *headrace]


def _pins_digest(environment: Environment, machine: Machine) -> str:
    parts = [str(ROOT), machine.python, *_content(environment)]
    if environment.source:
        parts += [machine.cpu, environment.without_amx]
    if environment.holds_headrace:
        parts.append(_HEADRACE_PINS.read_text("utf-8"))
    return _digest(parts)


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _read_stamp(environment: Environment) -> Mapping[str, object]:
    try:
        stamp = json.loads((FOLDER / environment.name / "stamp.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) and python_of(environment).exists() else {}


def _make_venv(environment: Environment) -> None:
    folder = FOLDER / environment.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        venv.create(folder / "venv", with_pip=True, symlinks=os.name != "nt")
    except subprocess.CalledProcessError:
        raise PeerError(
            "this Python makes no virtual environments; on Debian install python3-venv"
        ) from None


def _install_wheels(environment: Environment, say: Say) -> None:
    what = ["-r", _HEADRACE_PINS] if environment.holds_headrace else environment.wheels
    _pip(environment, say, "installing wheels", ["--only-binary", ":all:", *what])


def _build(environment: Environment, say: Say, flags: str) -> None:
    """Compile `source`; never from pip's cache, which knows neither the CPU nor the flags."""
    assert environment.source is not None
    package = environment.source.split("==")[0]
    name = f"compiling {environment.source} for minutes" + (f" with {flags}" if flags else "")
    options = ["--no-cache-dir", "--no-build-isolation", "--no-binary", package]
    options += ["--force-reinstall", environment.source]
    programs = os.pathsep.join([str(python_of(environment).parent), os.environ.get("PATH", "")])
    variables = {"PATH": programs, "CFLAGS": flags, "CXXFLAGS": flags}
    variables["CMAKE_BUILD_PARALLEL_LEVEL"] = str(os.cpu_count() or 1)
    _pip(environment, say, name, options, variables)


def _pip(
    environment: Environment,
    say: Say,
    title: str,
    options: Sequence[str | Path],
    variables: Mapping[str, str] | None = None,
) -> None:
    quiet = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    pip: list[str | Path] = [python_of(environment), "-m", "pip", "install"]
    command = [*pip, *quiet, "--no-deps", *options]
    run_logged(command, log_of(environment), f"{environment.name}: {title}", say, variables)


def run_logged(
    command: Command,
    log: Path,
    title: str,
    say: Say,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run with the output appended to `log` and a sign of life now and then.

    Raises:
        PeerError: it ended with another code than 0; names the last line of its output.
    """
    say(title)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=ROOT,
            env={**os.environ, "PYTHONUTF8": "1", **(variables or {})},
        )
        try:
            code = _wait(process, title, say)
        finally:
            process.kill()
    if code:
        raise PeerError(f"{title} failed: {last_line(log)} ({_shown(log)})")


def _wait(process: subprocess.Popen[bytes], title: str, say: Say) -> int:
    while True:
        try:
            return process.wait(_HEARTBEAT_S)
        except subprocess.TimeoutExpired:
            say(f"{title} ...")


def last_line(log: Path) -> str:
    """The last line of a log that is not blank, cut to the width of a table cell."""
    try:
        lines = log.read_text("utf-8", "replace").splitlines()
    except OSError:
        return "no output"
    return next((line.strip()[:160] for line in reversed(lines) if line.strip()), "no output")


def _shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)
