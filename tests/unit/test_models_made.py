"""MODEL may be a checkpoint: its package is made once, whoever asks, and never half."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_samples import write_gguf

from headrace.exporters.options import PRESETS
from headrace.runtime import cli
from headrace.runtime.commands.models import find_model
from headrace.runtime.errors import PackageError, StoreError
from headrace.runtime.manifest import MANIFEST_FILE, SCHEMA_VERSION, read_manifest
from headrace.runtime.store import packages
from headrace.runtime.store.places import HOME_VARIABLE, history_file, is_name, models_folder

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "my model.gguf", tokenizer__chat_template=TEMPLATE)


def made(home: Path) -> list[str]:
    """What is in the cache, remains of killed exporters included."""
    found = [path.name for path in (home / "packages").iterdir()]
    return sorted(name for name in found if name not in (".locks", ".sources"))


def fake_export(checkpoint: Path, package: Path) -> None:
    package.mkdir(parents=True)
    manifest = {"schema_version": SCHEMA_VERSION, "source": {"file": checkpoint.name}}
    (package / MANIFEST_FILE).write_text(json.dumps(manifest))


def test_run_makes_a_package_once_and_says_what_it_is(
    home: Path, gguf: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["run", str(gguf), "hi", "--max-new-tokens", "3"]
    assert cli.main(command) == 0
    first = capfd.readouterr()
    assert "nats from the FP32 model" in first.err
    assert "MB of weights" in first.err
    assert "3 tokens, the first after" in first.err
    assert "Ctrl-C leaves nothing behind" in first.err
    assert cli.main(command) == 0
    second = capfd.readouterr()
    assert (second.out, second.err) == (first.out, "")
    (name,) = made(home)
    assert name.startswith("my_model-")
    assert cli.main(["run", name, *command[2:]]) == 0  # the cache's name for it
    assert capfd.readouterr().out == first.out
    assert cli.main(["inspect", name]) == 0
    assert "my model.gguf (gguf)" in capfd.readouterr().out
    assert cli.main(["plan", str(gguf), "--devices", "H100"]) == 0
    assert capfd.readouterr().out.startswith("my model (")


def test_content_and_version_decide(
    home: Path, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "_export", fake_export)
    told: list[str] = []
    package, is_new = packages.package_of(gguf, told.append)
    assert is_new
    assert packages.package_of(gguf, told.append) == (package, False)
    os.utime(gguf)  # a new time, the same content
    copied = tmp_path / "elsewhere" / gguf.name
    copied.parent.mkdir()
    shutil.copyfile(gguf, copied)
    assert packages.package_of(gguf, told.append) == (package, False)
    assert packages.package_of(copied, told.append) == (package, False)
    with gguf.open("ab") as file:
        file.write(b"\0")
    other, is_new = packages.package_of(gguf, told.append)
    assert is_new
    assert other != package
    monkeypatch.setattr(packages, "version", lambda _: "99.0")
    newer, _ = packages.package_of(gguf, told.append)
    assert newer not in (package, other)
    assert packages.packages_made_of(gguf) == sorted([package, other, newer])


def test_what_is_read_of_a_folder_decides(
    home: Path,
    tiny_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(packages, "_export", fake_export)
    folder = tmp_path / "tiny"
    shutil.copytree(tiny_checkpoint(), folder)
    package, _ = packages.package_of(folder, print)
    (folder / "README.md").write_text("not read")
    assert packages.package_of(folder, print) == (package, False)
    config = folder / "config.json"
    config.write_text(config.read_text() + "\n")
    assert packages.package_of(folder, print)[0] != package


def test_a_checkpoint_that_cannot_be_exported(
    home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    strange = write_gguf(tmp_path / "strange.gguf", architecture="mamba9")
    assert cli.main(["run", str(strange), "hi"]) == cli.EXIT_FAILED
    complaint = capfd.readouterr().err
    assert "architecture 'mamba9' is not supported" in complaint
    assert "Traceback" not in complaint
    assert made(home) == []


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ("notes.txt", PackageError, "no GGUF"),
        ("nothing", StoreError, "there is no model 'nothing'"),
        ("no/such/folder", StoreError, "there is no model"),
        ("../x", StoreError, "there is no model"),
    ],
)
def test_what_is_no_model(
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    error: type[Exception],
    message: str,
) -> None:
    from headrace.runtime.commands.models import find_model

    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("some text")
    with pytest.raises(error, match=message):
        find_model(model)


def test_options_are_checked_before_minutes_are_spent(
    home: Path, gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", str(gguf), "hi", "--top-p", "2"]) == cli.EXIT_USAGE
    assert cli.main(["run", str(gguf), "hi", "--threads", "0"]) == cli.EXIT_USAGE
    assert not home.exists()


def test_without_the_exporter_the_extra_is_named(
    home: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda _: None)
    with pytest.raises(PackageError, match=r"pip install \"headrace\[export\]\""):
        packages.package_of(gguf, print)


SLOW_EXPORT = """
import sys, time
from pathlib import Path
from headrace.runtime.store import packages

def export(checkpoint, package):
    partial = package.parent / f".{package.name}.part"
    partial.mkdir(parents=True)
    print("started", flush=True)
    while not Path(sys.argv[2]).exists():
        time.sleep(0.01)
    (partial / "manifest.json").write_text("{}")
    partial.replace(package)

packages._export = export
print(packages.package_of(Path(sys.argv[1]), lambda text: print(text, flush=True))[1], flush=True)
"""


def start(gguf: Path, gate: Path) -> subprocess.Popen[str]:
    """A process that makes the package, and ends making it when `gate` is there."""
    return subprocess.Popen(
        [sys.executable, "-c", SLOW_EXPORT, str(gguf), str(gate)], stdout=subprocess.PIPE, text=True
    )


def until(process: subprocess.Popen[str], word: str) -> str:
    """What the process prints, up to a line with this word."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if word in line:
            return "".join(lines)
    raise AssertionError("".join(lines))


def test_of_two_processes_one_makes_it(home: Path, gguf: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with start(gguf, gate) as first:
        until(first, "started")
        with start(gguf, gate) as second:
            until(second, "waiting")
            gate.touch()
            assert "True" in until(first, "True")
            assert "started" not in until(second, "False")
    assert len(made(home)) == 1


def test_what_a_killed_process_left_is_removed(home: Path, gguf: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with start(gguf, gate) as first:
        until(first, "started")
        first.kill()
    assert made(home)[0].endswith(".part")
    gate.touch()
    with start(gguf, gate) as second:
        until(second, "True")
    (name,) = made(home)
    assert not name.startswith(".")


def test_a_preset_of_the_exporter_has_a_package_of_its_own(
    home: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[str, ...]] = []

    def export(checkpoint: Path, package: Path, *options: str) -> None:
        given.append(options)
        fake_export(checkpoint, package)

    monkeypatch.setattr(packages, "_export", export)
    usual = find_model(str(gguf)).package
    assert find_model(str(gguf), "latency").package == usual
    small = find_model(str(gguf), "low-memory").package
    assert small != usual
    assert find_model(str(gguf), "low-memory").package == small
    assert given == [(), ("--preset", "low-memory")]
    assert packages.packages_made_of(gguf) == sorted([small, usual])


def test_presets_are_those_of_the_exporter() -> None:
    assert tuple(PRESETS) == packages.EXPORT_PRESETS


def test_a_command_makes_the_package_that_its_preset_means(
    home: Path, gguf: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["run", str(gguf), "hi", "--max-new-tokens", "3", "--preset", "low-memory"]
    assert cli.main(command) == 0
    (package,) = packages.packages_made_of(gguf)
    assert read_manifest(package).targets[0].precision == "int4"


@pytest.mark.skipif(os.name == "nt", reason="Ctrl-C reaches a whole console on Windows")
def test_an_interrupted_export_leaves_nothing(home: Path, gguf: Path) -> None:
    command = [sys.executable, "-m", "headrace.runtime.cli", "run", str(gguf), "hi"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stderr is not None
        while not (home / "packages").exists() or not made(home):  # the exporter has begun
            time.sleep(0.01)
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        errors = process.stderr.read()
    assert process.returncode == cli.EXIT_INTERRUPTED
    assert b"Traceback" not in errors
    assert b"nothing was written" in errors
    assert made(home) == []


def test_places_are_those_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOME_VARIABLE, raising=False)
    if sys.platform == "linux":
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        assert models_folder() == tmp_path / "data" / "headrace" / "models"
        assert packages.packages_folder() == tmp_path / "cache" / "headrace" / "packages"
        assert history_file() == tmp_path / "state" / "headrace" / "chat_history"
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "one"))
    folders = {models_folder().parent, packages.packages_folder().parent, history_file().parent}
    assert folders == {tmp_path / "one"}


@pytest.mark.parametrize("name", ["smol", "SmolLM2-135M.Q4_1", "a", "7b", "x" * 100])
def test_names(name: str) -> None:
    assert is_name(name)


@pytest.mark.parametrize("name", [".", "..", ".x", "a/b", "a\\b", "a:b", "a b", "-x", "x.", "~x"])
def test_what_is_no_name(name: str) -> None:
    assert not is_name(name)


@pytest.mark.parametrize("name", ["", "con", "NUL.gguf", "lpt1", "é", "x" * 101, "a\n", "a\0b"])
def test_what_no_system_takes_is_no_name(name: str) -> None:
    assert not is_name(name)
