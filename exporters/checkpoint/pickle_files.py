"""Weights that are pickle files: recognized, refused, never opened."""

from __future__ import annotations

from pathlib import Path

from headrace.runtime.errors import CheckpointError

HEAD_BYTES = 16
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")

_ZIP_MAGIC = b"PK\x03\x04"  # torch.save since 1.6
_PICKLE_HEADS = tuple(bytes([0x80, protocol]) for protocol in range(2, 6))


def is_pickle(path: Path, head: bytes) -> bool:
    """`head`: the first HEAD_BYTES of the file."""
    return head.startswith((_ZIP_MAGIC, *_PICKLE_HEADS)) or path.suffix in PICKLE_SUFFIXES


def pickle_refusal(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} holds weights as a pickle file, which can run any code when it is opened; "
        "convert it to safetensors (or use the checkpoint's *.safetensors files)"
    )
