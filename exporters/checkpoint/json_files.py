"""JSON files of a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.runtime.errors import CheckpointError

_MAX_BYTES = 256 << 20  # far above any tokenizer.json


def read_object(path: Path) -> dict[str, object]:
    """The object in a JSON file.

    Raises:
        CheckpointError: missing, unreadable, not JSON, not an object, or with text that is no
            Unicode (JSON can escape half of a surrogate pair, which no file can be written with).
    """
    try:
        value = json.loads(read_text(path))
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}; download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} should hold a JSON object; download it again")
    return value


def maybe_object(path: Path) -> dict[str, object]:
    """The same; empty where there is no such file."""
    return read_object(path) if path.exists() else {}


def read_text(path: Path) -> str:
    """UTF-8 text of a file of sensible size."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{path} is larger than {_MAX_BYTES >> 20} MiB; it is damaged")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; add it to the folder") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{path} is not UTF-8 text; download it again") from None
