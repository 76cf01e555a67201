"""Sessions on disk: a text, and its keys and values, so that it need not be computed again.

A file is one line that names the format, the length of the header as 8 bytes (little-endian), the
header as JSON, and the keys and values as the backend laid them out. It is read only with the very
package and layout that it was written with, and only if its digest is right.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from headrace.backends.base import Capabilities
from headrace.runtime.errors import RequestError

_MAGIC = b"headrace session 1\n"
_MAX_HEADER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Session:
    """What a file holds besides keys and values.

    Attributes:
        prompt: as it was given to `save_session`: a text, token ids, or messages.
        token_ids: the beginning of it whose keys and values the file has.
    """

    prompt: Any
    token_ids: tuple[int, ...]


def write_session(
    path: Path, kv_identity: str, prompt: Any, token_ids: list[int], data: bytes
) -> None:
    """Write a file, wholly or not at all.

    Raises:
        RequestError: the prompt is not what JSON can hold.
        OSError: it cannot be written.
    """
    fields = {
        "kv_identity": kv_identity,
        "kv_sha256": hashlib.sha256(data).hexdigest(),
        "token_ids": token_ids,
        "prompt": prompt,
    }
    try:
        header = json.dumps(fields).encode()
    except (TypeError, ValueError) as error:
        raise RequestError(f"the conversation cannot be written to a file: {error}") from None
    # Readable by its owner alone, as `mkstemp` makes it.
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + len(header).to_bytes(8, "little") + header)
            file.write(data)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_session(path: Path, caps: Capabilities) -> tuple[Session, bytes]:
    """What `write_session` wrote: the session, and its keys and values.

    Raises:
        RequestError: the file is none, is damaged, or was written with another package.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        fields = _read_header(path, file)
        try:
            identity, digest = str(fields["kv_identity"]), str(fields["kv_sha256"])
            session = Session(fields["prompt"], tuple(map(int, fields["token_ids"])))
        except (KeyError, TypeError, ValueError, OverflowError):
            raise _damaged(path) from None
        if identity != caps.kv_identity:
            raise RequestError(
                f"{path} was saved with another package or target; load that one, or delete it"
            )
        num_bytes = len(session.token_ids) * caps.kv_bytes_per_token
        data = file.read(num_bytes + 1)
    if len(data) != num_bytes or hashlib.sha256(data).hexdigest() != digest:
        raise _damaged(path)
    if not all(0 <= token < caps.vocab_size for token in session.token_ids):
        raise _damaged(path)
    return session, data


def _read_header(path: Path, file: BinaryIO) -> dict[str, Any]:
    if file.read(len(_MAGIC)) != _MAGIC:
        raise RequestError(f"{path} is not a session that this version of headrace can read")
    num_bytes = int.from_bytes(file.read(8), "little")
    header = file.read(num_bytes) if num_bytes <= _MAX_HEADER_BYTES else b""
    try:
        fields = json.loads(header)
    except (ValueError, RecursionError):
        raise _damaged(path) from None
    if not isinstance(fields, dict):
        raise _damaged(path)
    return fields


def _damaged(path: Path) -> RequestError:
    return RequestError(f"{path} is damaged; delete it and save the session again")
