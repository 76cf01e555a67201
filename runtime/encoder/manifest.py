"""The schema of an encoder package: `manifest.json` with `"kind": "encoder"`.

Beside it are `tokenizer.json`, `precision_report.json` and one folder a target with a graph and its
weights. Rules are those of `manifest`: every file has its size and SHA-256, unknown keys are
refused.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path

from headrace.runtime.errors import PackageError
from headrace.runtime.manifest import (
    ENCODER_KIND,
    FileInfo,
    GoldenText,
    SourceInfo,
    TensorInfo,
    check_files,
    decode_object,
    read_raw_manifest,
)

POOLINGS = ("mean", "cls", "max")

# Names of graph inputs and outputs. N tokens of the call, packed; B texts; S the longest one.
INPUT_IDS = "input_ids"  # int64 [N]
POSITION_IDS = "position_ids"  # int64 [N]: place of each token in its text, from 0
GATHER_INDEX = "gather_index"  # int64 [B, S]: packed position of (text, i); 0 for padding
SCATTER_INDEX = "scatter_index"  # int64 [N]: b * S + i of each packed token
LENGTHS = "lengths"  # int64 [B]: tokens of each text
FIRST_TOKENS = "first_tokens"  # int64 [B]: packed position of each text's first (pooling "cls")
STATES = "states"  # float32 [N, hidden]; with pooling "cls" [B, hidden]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInfo:
    """The shape of the model. `max_tokens` is the longest text, special tokens included."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingInfo:
    """How token states become one vector.

    Attributes:
        mode: "mean" of all tokens, "cls" (the first token), or "max" of each value.
        normalize: the vector is divided by its length.
        stated: the checkpoint said so; otherwise it is the default of the exporter.
    """

    mode: str
    normalize: bool
    stated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderTokenizerInfo:
    """`golden`: texts with all their token ids, special tokens included, checked at load."""

    file: str
    golden: tuple[GoldenText, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderTargetInfo:
    """A graph for one kind of device; `file` is its path within the package."""

    name: str
    device: str
    precision: str
    file: str
    min_onnxruntime: str
    tensors: tuple[TensorInfo, ...]
    weight_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderManifest:
    """`kind` is always "encoder"."""

    schema_version: int
    kind: str
    generator: str
    model: EncoderInfo
    pooling: PoolingInfo
    source: SourceInfo
    tokenizer: EncoderTokenizerInfo
    targets: tuple[EncoderTargetInfo, ...]
    files: tuple[FileInfo, ...]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False) + "\n"


def read_encoder_manifest(folder: Path, *, verify_hashes: bool = False) -> EncoderManifest:
    """Read and check an encoder package.

    Raises:
        PackageError: as `manifest.read_manifest`, and for a package that is no encoder.
    """
    raw, path = read_raw_manifest(folder)
    if raw.get("kind") != ENCODER_KIND:
        raise PackageError(
            f"{folder} is no encoder: it generates text; use `headrace run` or Runtime.load, "
            "or export an embedding model"
        )
    manifest = decode_object(EncoderManifest, raw, str(path))
    _check_values(manifest, path)
    needed = [manifest.tokenizer.file, *(target.file for target in manifest.targets)]
    check_files(folder, needed, manifest.files, verify_hashes)
    return manifest


def _check_values(manifest: EncoderManifest, path: Path) -> None:
    """Refuse what has the right type and makes no sense."""
    for name, value in dataclasses.asdict(manifest.model).items():
        if type(value) is int and not 0 < value < 2**31:
            raise PackageError(f"{path}: model: {name}={value} is not a size")
    if manifest.pooling.mode not in POOLINGS:
        raise PackageError(
            f"{path}: pooling: mode={manifest.pooling.mode!r} is none of {', '.join(POOLINGS)}"
        )
    for target in manifest.targets:
        if not re.fullmatch(r"\d+\.\d+", target.min_onnxruntime, re.ASCII):
            raise PackageError(
                f"{path}: min_onnxruntime={target.min_onnxruntime!r} is not a version"
            )
