"""Stored models: a folder each, with the file and where it is from. There whole or not at all.

models/NAME/NAME.gguf
models/NAME/source.json
models/.NAME.partial/       the same while it is being fetched
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from headrace.runtime.errors import StoreError
from headrace.runtime.store.download import Progress, Remote, download
from headrace.runtime.store.packages import GGUF_MAGIC, packages_made_of
from headrace.runtime.store.places import checked_name, is_name, models_folder, packages_folder
from headrace.runtime.store.references import Reference

Stage = Callable[[str], Progress]  # what begins, to a function that hears how far it is

_SOURCE_FILE = "source.json"
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model that is there.

    Attributes:
        file: the GGUF file.
        address: it came from, without secrets.
        sha256: of the file, as it was when it came.
    """

    name: str
    file: Path
    address: str
    sha256: str
    bytes: int


def stored_models() -> list[StoredModel]:
    """All of them, by name."""
    folder = models_folder()
    names = sorted(p.name for p in folder.iterdir() if is_name(p.name)) if folder.exists() else []
    return [model for name in names if (model := find_stored(name)) is not None]


def find_stored(name: str) -> StoredModel | None:
    """The model of this name; None where there is none."""
    if not is_name(name):
        return None
    folder = models_folder() / name
    source = _read_source(folder)
    file = folder / f"{name}.gguf"
    if source is None or not file.is_file():
        return None
    sha256 = str(source.get("sha256"))
    return StoredModel(name, file, str(source.get("address")), sha256, file.stat().st_size)


def partial_models() -> list[str]:
    """Names of models of which only a part has arrived."""
    found = (path.name for path in models_folder().glob(".*.partial"))
    return sorted(name.removeprefix(".").removesuffix(".partial") for name in found)


def pull(
    reference: Reference, name: str, sha256: str | None, stage: Stage
) -> tuple[StoredModel, bool]:
    """Fetch a model, or what is missing of it; returns it, and whether it is new.

    Args:
        sha256: that it must have; None for what the server says, if it says something.
        stage: told what begins.

    Raises:
        StoreError: it cannot be fetched or stored, is no GGUF file, or has another hash.
    """
    checked_name(name)
    with _locked(name):
        there = find_stored(name)
        if there is not None:
            _require_same(there, reference, sha256)
            return there, False
        partial = _begin(reference, name)
        file = partial / f"{name}.gguf"
        remote = _remote(partial)

        def keep(known: Remote) -> None:
            fields = {"url_sha256": _digest_of(reference.url), **dataclasses.asdict(known)}
            _write_source(partial, fields)

        download(reference, file, remote, progress=stage(f"fetching {name}"), keep=keep)
        expected = sha256 or remote.sha256
        found = _sha256(file, stage(f"checking {name}"))
        if expected is not None and found != expected:
            shutil.rmtree(partial)
            raise StoreError(
                f"{reference.text} has another content than it should: its SHA-256 is {found}, not "
                f"{expected}; it was deleted"
            )
        with file.open("rb") as content:
            if content.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
                shutil.rmtree(partial)
                raise StoreError(f"{reference.text} is no GGUF file; it was deleted")
        _write_source(partial, {"address": reference.text, "sha256": found})
        folder = models_folder() / name
        partial.replace(folder)
        return StoredModel(
            name, folder / file.name, reference.text, found, remote.total_bytes or 0
        ), True


def remove(name: str) -> int:
    """Remove a stored model with the packages made of it, a partial one, or a package of the cache.

    Returns:
        How many bytes that were.

    Raises:
        StoreError: there is no such thing.
    """
    checked_name(name)
    with _locked(name):
        stored = find_stored(name)
        folders = [models_folder() / name, models_folder() / f".{name}.partial"]
        folders += packages_made_of(stored.file) if stored else [packages_folder() / name]
        folders = [folder for folder in folders if folder.is_dir()]
        if not folders:
            raise StoreError(f"there is no stored model {name!r}; `headrace list` shows what is")
        return sum(_remove_folder(folder) for folder in folders)


def folder_bytes(folder: Path) -> int:
    """Of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _remove_folder(folder: Path) -> int:
    """Out of sight first, so that nobody sees half of it."""
    num_bytes = folder_bytes(folder)
    aside = Path(tempfile.mkdtemp(prefix=".removed-", dir=folder.parent))
    try:
        folder.replace(aside / folder.name.lstrip("."))
    except OSError as error:
        aside.rmdir()
        raise StoreError(f"{folder} cannot be removed: {error.strerror}") from None
    shutil.rmtree(aside, ignore_errors=True)
    return num_bytes


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    locks = models_folder() / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(locks / name, timeout=0):
            yield
    except Timeout:
        raise StoreError(f"another process is fetching or removing {name}") from None


def _require_same(there: StoredModel, reference: Reference, sha256: str | None) -> None:
    if there.address != reference.text or (sha256 is not None and sha256 != there.sha256):
        raise StoreError(
            f"a model {there.name} is stored already, from {there.address} with SHA-256 "
            f"{there.sha256}; choose another --name, or `headrace rm {there.name}` first"
        )


def _begin(reference: Reference, name: str) -> Path:
    """The folder of what has arrived; empty where that is of another address."""
    partial = models_folder() / f".{name}.partial"
    source = _read_source(partial)
    if source is None or source.get("url_sha256") != _digest_of(reference.url):
        shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(exist_ok=True)
    return partial


def _remote(partial: Path) -> Remote:
    """What was known about the content when the last attempt ended."""
    source = _read_source(partial) or {}
    total, validator, sha256 = (source.get(k) for k in ("total_bytes", "validator", "sha256"))
    return Remote(
        total if isinstance(total, int) else None,
        validator if isinstance(validator, str) else None,
        sha256 if isinstance(sha256, str) else None,
    )


def _digest_of(url: str) -> str:
    """In place of an address that may have a secret in it."""
    return hashlib.sha256(url.encode()).hexdigest()


def _read_source(folder: Path) -> dict[str, object] | None:
    try:
        value = json.loads((folder / _SOURCE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _write_source(folder: Path, fields: dict[str, object]) -> None:
    text = json.dumps(fields, indent=1) + "\n"
    new = folder / f"{_SOURCE_FILE}.new"
    new.write_text(text, encoding="utf-8")
    new.replace(folder / _SOURCE_FILE)


def _sha256(file: Path, progress: Progress) -> str:
    digest, done, total = hashlib.sha256(), 0, file.stat().st_size
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress(done, total)
    return digest.hexdigest()
