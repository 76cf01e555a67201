"""Fetching models over a bad network, and what is kept of them."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoint_samples import write_gguf
from file_server import Site, serving

from headrace.exporters.package import export_package
from headrace.runtime import cli
from headrace.runtime.errors import StoreError
from headrace.runtime.store import download as downloads
from headrace.runtime.store import models, packages
from headrace.runtime.store.places import HOME_VARIABLE
from headrace.runtime.store.references import checked_sha256, parse_reference

CONTENT = b"GGUF" + bytes(range(256)) * 4000  # a megabyte
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(downloads, "_FIRST_WAIT_S", 0.0)
    return tmp_path / "home"


@pytest.fixture
def site() -> Iterator[Site]:
    with serving(Site(files={"/a.gguf": CONTENT})) as site:
        yield site


def pull(
    address: str, name: str = "a", sha256: str | None = None
) -> tuple[models.StoredModel, bool]:
    reference = parse_reference(address, has_sha256=sha256 is not None)
    return models.pull(reference, name, sha256, lambda _: lambda done, total: None)


def visible(home: Path) -> list[str]:
    """Names that a user sees in the folder of models."""
    folder = home / "models"
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))


def asked_from(site: Site) -> list[int]:
    """Where each request for content began."""
    found = [headers.get("Range", "bytes=0-") for _, headers in site.seen]
    return [int(text.removeprefix("bytes=").rstrip("-")) for text in found]


def test_a_model_is_fetched_once(site: Site, home: Path) -> None:
    model, is_new = pull(f"{site.address}/a.gguf")
    assert is_new
    assert model.file.read_bytes() == CONTENT
    assert (model.sha256, model.bytes) == (SHA256, len(CONTENT))
    assert models.find_stored("a") == model
    assert models.stored_models() == [model]
    assert pull(f"{site.address}/a.gguf", sha256=SHA256) == (model, False)
    assert len(site.seen) == 1
    assert visible(home) == ["a"]


def test_dropped_connections_go_on(site: Site) -> None:
    site.drop_after = [1000, 0, 0, 500_000]
    model, _ = pull(f"{site.address}/a.gguf")
    assert model.file.read_bytes() == CONTENT
    assert asked_from(site) == [0, 1000, 1000, 1000, 501_000]


def test_a_later_command_goes_on(site: Site, home: Path) -> None:
    site.drop_after = [300_000] + [0] * 9
    with pytest.raises(StoreError, match="300000 bytes are there, and the same command goes on"):
        pull(f"{site.address}/a.gguf")
    assert visible(home) == []
    assert models.find_stored("a") is None
    assert models.partial_models() == ["a"]
    site.drop_after = []
    model, _ = pull(f"{site.address}/a.gguf")
    assert model.file.read_bytes() == CONTENT
    assert asked_from(site)[-1] == 300_000
    assert models.partial_models() == []


@pytest.mark.parametrize("how", ["other content", "no ranges", "no validator", "other address"])
def test_parts_of_different_contents_are_never_joined(site: Site, how: str) -> None:
    other = b"GGUF" + CONTENT[:3:-1]
    site.has_etag = how != "no validator"
    site.drop_after = [300_000] + [0] * 9
    with pytest.raises(StoreError):
        pull(f"{site.address}/a.gguf")
    site.drop_after = []
    site.has_ranges = how != "no ranges"
    site.files = {"/a.gguf": other, "/b.gguf": other}
    path = "/b.gguf" if how == "other address" else "/a.gguf"
    assert pull(site.address + path)[0].file.read_bytes() == other


def test_content_that_became_shorter(site: Site) -> None:
    site.drop_after = [300_000] + [0] * 9
    with pytest.raises(StoreError):
        pull(f"{site.address}/a.gguf")
    site.drop_after = []
    site.statuses = [416]
    site.files = {"/a.gguf": CONTENT[:1000]}
    assert pull(f"{site.address}/a.gguf")[0].file.read_bytes() == CONTENT[:1000]


def test_passing_errors_of_the_server_are_waited_for(site: Site) -> None:
    site.statuses = [503, 429, 500]
    assert pull(f"{site.address}/a.gguf")[1]


@pytest.mark.parametrize(
    ("statuses", "path", "message"),
    [
        ([], "/b.gguf", "404 Not Found; look the address up"),
        ([403], "/a.gguf", "403 Forbidden; set HF_TOKEN"),
        ([503] * 9, "/a.gguf", "503 Service Unavailable; 0 bytes are there"),
    ],
)
def test_what_the_server_refuses(
    site: Site, home: Path, statuses: list[int], path: str, message: str
) -> None:
    site.statuses = statuses
    with pytest.raises(StoreError, match=message):
        pull(site.address + path)
    assert visible(home) == []


def test_a_wrong_hash_leaves_nothing(site: Site, home: Path) -> None:
    with pytest.raises(StoreError, match=f"its SHA-256 is {SHA256}, not {'0' * 64}"):
        pull(f"{site.address}/a.gguf", sha256="0" * 64)
    assert visible(home) == models.partial_models() == []


def test_a_published_hash_is_compared(
    site: Site, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", site.address)
    monkeypatch.setenv("HF_TOKEN", "secret")
    path = "/org/repo/resolve/main/a%20b.gguf"
    with serving(Site(files={"/blob": CONTENT})) as store:
        site.redirects = {path: f"{store.address}/blob"}
        site.linked = {path: "1" * 64}
        with pytest.raises(StoreError, match=r"1{64}; it was deleted"):
            pull("hf://org/repo/a b.gguf")
        site.linked = {path: SHA256}
        assert pull("hf://org/repo/a b.gguf")[0].sha256 == SHA256
        assert site.seen[-1][1]["Authorization"] == "Bearer secret"
        assert all("Authorization" not in headers for _, headers in store.seen)
    assert visible(home) == ["a"]


@pytest.mark.parametrize("target", ["file:///etc/hosts", "ftp://127.0.0.1/a"])
def test_no_redirect_leaves_the_web(site: Site, target: str) -> None:
    site.redirects = {"/r": target}
    with pytest.raises(StoreError, match=r"not safe to follow|not allowed"):
        pull(f"{site.address}/r")


def test_what_is_no_model_is_not_kept(site: Site, home: Path) -> None:
    site.files["/login"] = b"<!doctype html>"
    with pytest.raises(StoreError, match="is no GGUF file"):
        pull(f"{site.address}/login")
    site.has_length = False
    with pytest.raises(StoreError, match="tells no length"):
        pull(f"{site.address}/a.gguf")
    assert visible(home) == []


def test_room_is_asked_for_before(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(free=len(CONTENT) - 1)
    monkeypatch.setattr(downloads.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StoreError, match=r"1 MB are to be fetched and 1 MB are free"):
        pull(f"{site.address}/a.gguf")
    usage.free += 1
    assert pull(f"{site.address}/a.gguf")[1]


def test_a_full_disk_keeps_what_has_arrived(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    write = downloads._write

    def fill(response: object, file: Path, *rest: object) -> None:
        file.write_bytes(CONTENT[:5000])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(downloads, "_write", fill)
    with pytest.raises(StoreError, match="no space left"):
        pull(f"{site.address}/a.gguf")
    monkeypatch.setattr(downloads, "_write", write)
    assert pull(f"{site.address}/a.gguf")[0].file.read_bytes() == CONTENT
    assert asked_from(site) == [0, 5000]


def test_a_killed_download_goes_on(site: Site, home: Path) -> None:
    site.stall_after = 700_000
    command = [sys.executable, "-m", "headrace.runtime.cli", "pull", f"{site.address}/a.gguf"]
    part = home / "models" / ".a.partial" / "a.gguf"
    with subprocess.Popen(command) as process:
        while not part.exists() or part.stat().st_size == 0:
            time.sleep(0.01)
            assert process.poll() is None
        process.kill()
    site.go_on()
    assert visible(home) == []
    arrived = part.stat().st_size
    assert 0 < arrived <= 700_000
    assert pull(f"{site.address}/a.gguf")[0].file.read_bytes() == CONTENT
    assert asked_from(site) == [0, arrived]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("a.gguf", "not an address of a model; give hf://"),
        ("https://", "not an address of a model"),
        ("ftp://host/a.gguf", "not an address of a model"),
        ("hf://org/repo", "not an address of a model"),
        ("hf://org//a.gguf", "not an address of a model"),
        ("hf://org/repo/../../secret", "not an address of a model"),
        ("http://example.org/a.gguf", "could be changed on its way; use https://"),
        ("https://example.org/a b.gguf", "written as %20"),
        ("https://[::1/a.gguf", "is not an address"),
    ],
)
def test_wrong_addresses(address: str, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        parse_reference(address, has_sha256=False)


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    found = parse_reference("hf://org/repo@v1.0/some folder/m.Q4.gguf", has_sha256=False)
    assert found.url == "https://huggingface.co/org/repo/resolve/v1.0/some%20folder/m.Q4.gguf"
    assert found.name == "m.Q4"
    secret = parse_reference("https://me:pw@example.org/m.gguf?token=1#x", has_sha256=False)
    assert secret.text == "https://example.org/m.gguf"
    assert parse_reference("http://example.org/m.gguf", has_sha256=True).name == "m"
    assert checked_sha256(SHA256.upper()) == SHA256
    with pytest.raises(StoreError, match="64 hexadecimal digits"):
        checked_sha256(SHA256[:-1])


@pytest.mark.parametrize("name", ["../a", "a/b", "", ".a", "CON", "a\\b"])
def test_no_name_leaves_the_folder(site: Site, tmp_path: Path, name: str) -> None:
    for act in (lambda: pull(f"{site.address}/a.gguf", name), lambda: models.remove(name)):
        with pytest.raises(StoreError, match="cannot be the name of a model"):
            act()
    assert not (tmp_path / "home").exists()


def test_a_name_is_not_taken_over(site: Site) -> None:
    pull(f"{site.address}/a.gguf")
    site.files["/b.gguf"] = CONTENT
    with pytest.raises(StoreError, match="a model a is stored already, from"):
        pull(f"{site.address}/b.gguf")
    with pytest.raises(StoreError, match="stored already"):
        pull(f"{site.address}/a.gguf", sha256="0" * 64)


def test_two_at_once_do_not_mix(site: Site) -> None:
    def meanwhile(_: str) -> Callable[[int, int], None]:
        with pytest.raises(StoreError, match="another process is fetching or removing a"):
            pull(f"{site.address}/a.gguf")
        return lambda done, total: None

    models.pull(parse_reference(f"{site.address}/a.gguf", has_sha256=False), "a", None, meanwhile)


def test_commands(
    tmp_path: Path, home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "small.gguf", tokenizer__chat_template="{{ messages[0].content }}")
    assert cli.main(["list"]) == 0
    assert "headrace pull" in capfd.readouterr().err
    assert cli.main(["pull", file.as_uri()]) == 0
    assert "headrace run small PROMPT" in capfd.readouterr().err
    monkeypatch.setattr(packages, "_export", partial(export_package, calibrate=False))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "small", "hi", "--max-new-tokens", "2"]) == 0
    answer = capfd.readouterr().out
    assert cli.main(["list", "--json"]) == 0
    listed = json.loads(capfd.readouterr().out)
    assert [entry["kind"] for entry in listed] == ["model", "package"]
    assert cli.main(["list"]) == 0
    text = capfd.readouterr().out
    assert "made of small.gguf" in text
    assert file.as_uri() in text
    assert cli.main(["run", listed[1]["name"], "hi", "--max-new-tokens", "2"]) == 0
    assert capfd.readouterr().out == answer
    assert cli.main(["rm", "small"]) == 0
    assert cli.main(["list", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == []
    assert cli.main(["rm", "small"]) == cli.EXIT_FAILED
    assert "no stored model 'small'" in capfd.readouterr().err
    assert packages.cached_packages() == []


def test_an_incomplete_model_is_listed_and_removed(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.drop_after = [300_000] + [0] * 9
    assert cli.main(["pull", f"{site.address}/a.gguf"]) == cli.EXIT_FAILED
    assert cli.main(["list"]) == 0
    assert "incomplete" in capsys.readouterr().out
    assert cli.main(["rm", "a"]) == 0
    assert models.partial_models() == []
