"""What a command means by MODEL, and the commands about stored models."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from headrace.runtime.errors import StoreError
from headrace.runtime.manifest import MANIFEST_FILE
from headrace.runtime.store.models import find_stored
from headrace.runtime.store.packages import is_checkpoint, package_of
from headrace.runtime.store.places import is_name, packages_folder


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model that a command was given.

    Attributes:
        name: what to call it: the folder's or file's name, or the one it is stored under.
        package: its folder; whether it is a sound one is found when it is read.
        is_new: it was made of a checkpoint just now.
    """

    name: str
    package: Path
    is_new: bool = False


def find_model(model: str, preset: str | None = None) -> FoundModel:
    """The package that MODEL means: a package, a checkpoint of which one is made, or a name.

    `preset` is what a package is made for, if one is.

    Raises:
        StoreError: it is nothing of that.
        PackageError: a checkpoint cannot be made a package.
    """
    path = Path(model)
    if path.exists():
        name = path.resolve().name.removesuffix(".gguf")
        if is_checkpoint(path):
            return FoundModel(name, *package_of(path, say, preset))
        return FoundModel(name, path)
    if (stored := find_stored(model)) is not None:
        return FoundModel(model, *package_of(stored.file, say, preset))
    if is_name(model) and (packages_folder() / model / MANIFEST_FILE).is_file():
        return FoundModel(model, packages_folder() / model)
    raise StoreError(
        f"there is no model {model!r}: neither a package, a GGUF file or a Hugging Face folder nor "
        "a name that `headrace list` shows"
    )


def say(text: str) -> None:
    """A sentence for the person at the terminal."""
    print(f"headrace: {text}", file=sys.stderr, flush=True)
