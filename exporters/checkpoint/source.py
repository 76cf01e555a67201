"""Open a checkpoint, whatever its format. The format is decided by content, not by file name."""

from __future__ import annotations

from pathlib import Path

from headrace.exporters.checkpoint.gguf import open_gguf
from headrace.exporters.checkpoint.gguf_header import MAGIC
from headrace.exporters.checkpoint.onnx_folder import find_onnx, open_onnx
from headrace.exporters.checkpoint.pickle_files import HEAD_BYTES, is_pickle, pickle_refusal
from headrace.exporters.checkpoint.safetensors import is_safetensors, open_file, open_folder
from headrace.exporters.checkpoint.values import (
    Checkpoint,
    Config,
    LazyTensor,
    QuantBlocks,
    TokenizerSource,
)
from headrace.runtime.errors import CheckpointError

__all__ = [
    "Checkpoint",
    "Config",
    "LazyTensor",
    "QuantBlocks",
    "TokenizerSource",
    "open_checkpoint",
]


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file, a Hugging Face folder, or a safetensors file beside its config.json.

    A folder has safetensors, or, for an encoder, an ONNX file in their place.

    Raises:
        CheckpointError: nothing is there, it is no checkpoint, it is damaged, or its weights are
            pickle files.
    """
    try:
        if path.is_dir():
            return _open_folder(path)
        head = _first_bytes(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if head.startswith(MAGIC):
        return open_gguf(path)
    if is_pickle(path, head):
        raise pickle_refusal(path)
    if is_safetensors(head):
        return open_file(path)
    if not head:
        raise CheckpointError(f"{path} is empty; download it again")
    raise CheckpointError(
        f"{path} is not a checkpoint: neither GGUF nor safetensors; give a .gguf file or a folder "
        "with config.json and *.safetensors"
    )


def _open_folder(folder: Path) -> Checkpoint:
    """Safetensors where there are any, else ONNX."""
    has_safetensors = any(folder.glob("*.safetensors*"))  # an index counts
    onnx = None if has_safetensors else find_onnx(folder)
    return open_folder(folder) if onnx is None else open_onnx(folder, onnx)


def _first_bytes(path: Path) -> bytes:
    if path.exists() and not path.is_file():  # a pipe would keep us waiting
        raise CheckpointError(f"{path} is neither a file nor a folder")
    try:
        with path.open("rb") as stream:
            return stream.read(HEAD_BYTES)
    except ValueError as error:  # a NUL, or text that no file system can hold
        raise CheckpointError(f"{str(path)!r} is not a path: {error}") from None
