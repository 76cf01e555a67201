"""Packages made of checkpoints on the way, each once, in a cache.

A package is named after its checkpoint and a digest of all that decides how it comes out: the
checkpoint's content, the version of headrace and a preset, if the exporter has that. The content is
hashed when a file is seen first; after that its path, size and time of change stand for it.

The exporter runs as a process of its own: it needs more memory than decoding does and other
libraries, and all of it is given back when it ends.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock, Timeout

from headrace.runtime.errors import PackageError
from headrace.runtime.manifest import (
    MANIFEST_FILE,
    SCHEMA_VERSION,
    file_sha256,
    read_raw_manifest,
)
from headrace.runtime.store.places import packages_folder

Say = Callable[[str], None]

GGUF_MAGIC = b"GGUF"
EXPORT_PRESETS = ("low-memory",)  # those of `runtime-export --preset`

_DIGEST_LENGTH = 10
_NAME_LENGTH = 60
# Files of a Hugging Face folder that an export reads.
_READ = ("*.safetensors", "*.json", "*.jinja", "*.onnx", "*.model", "*/config.json")
_EXPORTER = "headrace.exporters.cli"
_NEEDED = ("onnx_ir", "gguf", "safetensors", "rich")


def is_checkpoint(path: Path) -> bool:
    """Whether this is something to export, rather than a package.

    Raises:
        PackageError: a file that is no checkpoint.
    """
    if not path.is_file():
        return (path / "config.json").is_file() and not (path / MANIFEST_FILE).exists()
    with path.open("rb") as file:
        if file.read(len(GGUF_MAGIC)) == GGUF_MAGIC:
            return True
    raise PackageError(f"{path} is a file and no GGUF; give a package or a checkpoint")


def package_of(checkpoint: Path, say: Say, preset: str | None = None) -> tuple[Path, bool]:
    """The package of a checkpoint, and whether it was made now.

    Args:
        say: told in a sentence what takes long.
        preset: what the package is for; one that the exporter does not have changes nothing.

    Raises:
        PackageError: it cannot be made; the exporter has said why.
        OSError: a folder cannot be read or written.
    """
    options = ["--preset", preset] if preset in EXPORT_PRESETS else []
    package = packages_folder() / _package_name(checkpoint, options)
    if (package / MANIFEST_FILE).exists():
        return package, False
    _require_exporter(checkpoint)
    locks = package.parent / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    lock = FileLock(locks / package.name)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        say(f"another process is making {package.name}; waiting for it")
        lock.acquire()
    try:
        if (package / MANIFEST_FILE).exists():
            return package, False
        _remove_remains(package)
        say(
            f"making a package of {checkpoint.name}, once; this takes minutes (about three for 135 "
            f"million weights on two cores), and Ctrl-C leaves nothing behind"
        )
        _export(checkpoint, package, *options)
    finally:
        lock.release()
    say(f"it is kept in {package}")
    return package, True


def packages_made_of(checkpoint: Path) -> list[Path]:
    """Packages in the cache that are this checkpoint's, made by whatever version."""
    name = re.compile(rf"{re.escape(_stem(checkpoint))}-[0-9a-f]{{{_DIGEST_LENGTH}}}")
    return [package for package, _ in cached_packages() if name.fullmatch(package.name)]


def cached_packages() -> list[tuple[Path, str]]:
    """Packages of the cache, and the names of the files that they were made of."""
    found = []
    for manifest in sorted(packages_folder().glob(f"*/{MANIFEST_FILE}")):
        with suppress(PackageError, KeyError, TypeError):  # none that this version knows
            raw, _ = read_raw_manifest(manifest.parent)
            found.append((manifest.parent, str(raw["source"]["file"])))
    return found


def _package_name(checkpoint: Path, options: Sequence[str]) -> str:
    made_by = " ".join([f"headrace {version('headrace')}, schema {SCHEMA_VERSION}", *options])
    digest = hashlib.sha256(f"{_content_digest(checkpoint)} {made_by}".encode()).hexdigest()
    return f"{_stem(checkpoint)}-{digest[:_DIGEST_LENGTH]}"


def _stem(checkpoint: Path) -> str:
    name = checkpoint.resolve().name
    stem = re.sub(r"[^A-Za-z0-9._-]+", "_", name.removesuffix(".gguf"))[:_NAME_LENGTH]
    return stem.strip("._-") or "model"


def _content_digest(checkpoint: Path) -> str:
    """Of every file that an export reads; of those that were seen before, from memory."""
    if checkpoint.is_file():
        return _remembered_sha256(checkpoint)
    files = sorted({path for pattern in _READ for path in checkpoint.glob(pattern)})
    lines = [f"{path.relative_to(checkpoint)} {_remembered_sha256(path)}" for path in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _remembered_sha256(path: Path) -> str:
    found = path.stat()
    seen = f"{path.resolve()} {found.st_size} {found.st_mtime_ns}"
    memory = packages_folder() / ".sources" / hashlib.sha256(seen.encode()).hexdigest()
    try:
        remembered = memory.read_text(encoding="ascii")
        if len(remembered) == hashlib.sha256().digest_size * 2:
            return remembered
    except FileNotFoundError:
        pass
    digest = file_sha256(path)
    memory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", encoding="ascii", dir=memory.parent, delete=False
    ) as partial:
        partial.write(digest)
    Path(partial.name).replace(memory)
    return digest


def _require_exporter(checkpoint: Path) -> None:
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise PackageError(
            f"{checkpoint} is a checkpoint, and making a package of it needs {missing[0]}: "
            'pip install "headrace[export]"'
        )


def _remove_remains(package: Path) -> None:
    """What an exporter that was killed left beside the package; its lock is ours."""
    for remains in package.parent.glob(f".{package.name}.*"):
        shutil.rmtree(remains, ignore_errors=True)


def _export(checkpoint: Path, package: Path, *options: str) -> None:
    """Run the exporter; all that it prints goes to the standard error."""
    command = [sys.executable, "-m", _EXPORTER, str(checkpoint), "-o", str(package), *options]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2) as exporter:
        try:
            code = exporter.wait()
        except KeyboardInterrupt:  # which it has heard, too: it cleans up
            exporter.wait()
            raise
    if code:
        raise PackageError(f"no package was made of {checkpoint}, for the reason above")
