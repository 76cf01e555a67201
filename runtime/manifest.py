"""The package schema: what the exporter writes and the runtime reads.

A package is a folder with `manifest.json`, `tokenizer.json`, optionally `chat_template.jinja`,
`generation_config.json`, `precision_report.json`, and one folder a target (`cpu_int8/`). The
manifest names every file with its size and SHA-256; nothing is inferred from file names.

`read_manifest` checks sizes always and hashes on request. Unknown keys are refused: a package that
says more than this reader understands carries a newer `schema_version`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from headrace.runtime.errors import PackageError
from headrace.runtime.rank_info import RankInfo, ranks_problem

SCHEMA_VERSION = 1
MANIFEST_FILE = "manifest.json"
ENCODER_KIND = "encoder"  # `kind` of a package that `encoder_manifest` reads
KV_DTYPES = ("float32", "float16", "int8", "int4")
_MAX_INT = 2**63 - 1

# Longest row of a step. A slot holds context + row tokens, since attention asks for room for a
# padded row; graphs carry rotary tables of that length.
MAX_ROW_TOKENS = 1024

# Names of graph inputs and outputs. N new tokens of the step, packed; B slots bound; S longest row;
# R logits asked for; C slot capacity in tokens.
INPUT_IDS = "input_ids"  # int64 [N]
GATHER_INDEX = "gather_index"  # int64 [B, S]: packed position of (slot, i); 0 for padding
SCATTER_INDEX = "scatter_index"  # int64 [N]: b * S + i of each packed token
SEQLENS_K = "seqlens_k"  # int32 [B]: past + new - 1
TOTAL_TOKENS = "total_tokens"  # int32 []: C
QUERY_SEQLENS = "query_seqlens"  # int32 [B]: new tokens of each slot, 0 for an idle one
LOGITS_INDEX = "logits_index"  # int64 [R]: packed positions whose logits are wanted
POSITION_IDS = "position_ids"  # int64 [B, S] (form "tree")
ATTENTION_BIAS = "attention_bias"  # float32 [B, 1, S, C] (form "tree")
INVERSE_TEMPERATURE = "inverse_temperature"  # float32 [R, 1]; 0 where probabilities are not wanted
# [B, kv_heads, C, head_dim]; of the form "paged" [M, T, kv_heads, head_dim]
PAST_KEY, PAST_VALUE = "past_key.{}", "past_value.{}"
PRESENT_KEY, PRESENT_VALUE = "present_key.{}", "present_value.{}"
LOGITS = "logits"  # float32 [R, vocab]
ENTROPY = "entropy"  # float32 [R], nats
# At inverse_temperature, float32 [R, vocab] padded to whole blocks, and of each block the largest
# and the sum, [R, blocks]. No rows where none has a temperature.
PROBABILITIES, BLOCK_MAXIMA, BLOCK_SUMS = "probabilities", "block_maxima", "block_sums"
PROBABILITY_BLOCK = 128  # tokens
# Of the form "paged" in place of the cache's own: M blocks in the pool, T tokens in a block.
CUMULATIVE_SEQLENS = "cumulative_seqlens"  # int32 [B + 1]: packed position where each row begins
CACHED_SEQLENS = "cached_seqlens"  # int32 [B]: tokens of each row that are in the cache already
BLOCK_TABLE = "block_table"  # int32 [B, longest]: blocks of each row in order, -1 beyond
SLOT_MAPPING = "slot_mapping"  # int32 [N]: block * T + offset where each token is written
ATTENTION_METADATA = "attention_metadata"  # int32 [2], on the host: bounds of new and all tokens
POSITIONS = "positions"  # int64 [N], where a model has learned positions
ARGMAX = "argmax"  # int64 [R]: the likeliest token
HEAD_MATRIX = "head.matrix"  # a weight: what the last hidden state is multiplied with, if rotated
# Between stages, as layer {} takes them from those before it: float32 [N, hidden].
LAYER_RESIDUAL, LAYER_NORMED = "layer_residual.{}", "layer_normed.{}"
HIDDEN = "hidden"  # float32 [R, hidden]: last hidden state, after the final norm
# Of the graph of heads: S states, K heads, the likeliest tokens of each head first.
NUM_CANDIDATES = "num_candidates"  # int64 [1]: C
HEAD_TOKENS = "head_tokens"  # int64 [K, S, C]
HEAD_PROBABILITIES = "head_probabilities"  # float32 [K, S, C]
# Of the pieces of a rank: what is to be summed over ranks, [N or R, hidden], and the residual
# stream, as they leave a piece and as they enter the next.
PARTIAL, RESIDUAL = "partial", "residual"
SUMMED, CARRIED = "summed", "carried"
# float32 [R, 3] of a rank's logits: the largest m, sum of e^(x - m), sum of (x - m) e^(x - m)
HEAD_SUMS = "head_sums"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The shape of the model. `context_tokens` is the longest sequence it was trained for."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_tokens: int
    tied_embeddings: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceInfo:
    """Where the weights came from. `file` is a name without its folder."""

    format: str
    file: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenText:
    """A text and the token ids that the checkpoint's tokenizer makes of it, checked at load."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerInfo:
    """`add_bos`: prepend `bos_token_id` to raw prompts. A chat template adds its own."""

    file: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool
    chat_template: str | None
    golden: tuple[GoldenText, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheInfo:
    """How keys and values are kept.

    Attributes:
        dtype: "float32", "float16", "int8" or "int4" (static per-channel scales, folded into the
            graph).
        block_tokens: tokens in a block of the pool that form "paged" works on; None where a
            sequence's cache is one piece.
    """

    dtype: str
    bytes_per_token: int
    block_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInfo:
    """One ONNX graph of a target; all graphs of a target share its weight file.

    Attributes:
        form: "ragged" (GroupQueryAttention with query_seqlens), "uniform" (without: every slot
            of a call has one new token, or there is one slot), "tree" (ragged with position_ids
            and attention_bias), "paged" (PagedAttention over blocks).
        file: path within the package, with forward slashes.
        min_onnxruntime: oldest onnxruntime that runs it, "1.32".
        inputs, outputs: names without the per-layer cache.
        stages: the same cut into consecutive layers, in their order; empty where it is not.
    """

    form: str
    file: str
    min_onnxruntime: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    stages: tuple[GraphInfo, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Precision of one weight as stored in a target."""

    name: str
    format: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsInfo:
    """Medusa heads on the hidden states of a target.

    Attributes:
        file: their graph, which has a weight file of its own.
        num_heads: tokens that they guess, beyond the one that the model's own head gives.
        vocab_size: tokens that they choose among.
        weight_bytes: of their weight file.
        source: what they were read from.
    """

    file: str
    num_heads: int
    vocab_size: int
    weight_bytes: int
    source: SourceInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetInfo:
    """One set of graphs for one kind of device.

    Attributes:
        name: folder, e.g. "cpu_int8".
        device: "cpu" or "cuda".
        precision: the `--precision` it was exported with.
        weight_bytes: of all weight files together, without those of heads.
        ranks: where it is split between processes; `graphs` is empty then, and the cache's bytes
            are those of all ranks.
    """

    name: str
    device: str
    precision: str
    kv_cache: KvCacheInfo
    graphs: tuple[GraphInfo, ...]
    tensors: tuple[TensorInfo, ...]
    weight_bytes: int
    heads: HeadsInfo | None = None
    ranks: tuple[RankInfo, ...] = ()

    @property
    def files(self) -> list[str]:
        """Of all its graphs and heads."""
        pieces = [file for rank in self.ranks for graph in rank.graphs for file in graph.files]
        heads = [] if self.heads is None else [self.heads.file]
        graphs = [one.file for graph in self.graphs for one in (graph, *graph.stages)]
        return [*graphs, *pieces, *heads]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    schema_version: int
    generator: str
    model: ModelInfo
    source: SourceInfo
    tokenizer: TokenizerInfo
    targets: tuple[TargetInfo, ...]
    files: tuple[FileInfo, ...]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False) + "\n"


def is_encoder_package(folder: Path) -> bool:
    """Whether `encoder.manifest` reads this package, and not `read_manifest`.

    Raises:
        PackageError: as `read_raw_manifest`.
    """
    return bool(read_raw_manifest(folder)[0].get("kind") == ENCODER_KIND)


def read_manifest(folder: Path, *, verify_hashes: bool = False) -> Manifest:
    """Read and check a package.

    Raises:
        PackageError: not a package, a newer schema, a missing file, a file of another size, or
            (with `verify_hashes`) another content.
    """
    raw, path = read_raw_manifest(folder)
    if raw.get("kind") == ENCODER_KIND:
        raise PackageError(
            f"{folder} is an encoder: it turns texts into vectors and generates nothing; "
            "use `headrace embed` or Embedder.load"
        )
    manifest = decode_object(Manifest, raw, str(path))
    _check_values(manifest, path)
    needed = [manifest.tokenizer.file]
    needed += [manifest.tokenizer.chat_template] if manifest.tokenizer.chat_template else []
    needed += [file for target in manifest.targets for file in target.files]
    check_files(folder, needed, manifest.files, verify_hashes)
    return manifest


def read_raw_manifest(folder: Path) -> tuple[dict[str, Any], Path]:
    """The manifest's JSON, of whatever kind of package, and its path.

    Raises:
        PackageError: not a package, or of another schema.
    """
    path = folder / MANIFEST_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PackageError(
            f"{folder} is not a headrace package: it has no {MANIFEST_FILE}; "
            "make one with runtime-export"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise PackageError(f"{path} cannot be read: {error}") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("schema_version"), int):
        raise PackageError(f"{path} is not a package manifest: it has no schema_version")
    if raw["schema_version"] != SCHEMA_VERSION:
        raise PackageError(
            f"{path} has schema version {raw['schema_version']}, this headrace reads "
            f"{SCHEMA_VERSION}; export the package again or use the headrace that made it"
        )
    return raw, path


def file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def package_path(folder: Path, relative: str) -> Path:
    """Path of a package file; refuses one that leaves the package."""
    pure = PurePosixPath(relative)
    if pure.is_absolute() or ".." in pure.parts or "\\" in relative or ":" in relative:
        raise PackageError(f"the manifest names {relative!r}, which is outside of its package")
    return folder / pure


def _check_values(manifest: Manifest, path: Path) -> None:
    """Refuse what has the right type and makes no sense."""
    for name, value in dataclasses.asdict(manifest.model).items():
        if type(value) is int and not 0 < value < 2**31:
            raise PackageError(f"{path}: model: {name}={value} is not a size")
    for target in manifest.targets:
        cache = target.kv_cache
        if cache.dtype not in KV_DTYPES or cache.bytes_per_token < 1:
            raise PackageError(f"{path}: {target.name!r} has a KV cache that is not known: {cache}")
        if cache.block_tokens is not None and not 0 < cache.block_tokens <= MAX_ROW_TOKENS:
            raise PackageError(f"{path}: block_tokens={cache.block_tokens} is not a size")
        if problem := ranks_problem(target.ranks, manifest.model.vocab_size):
            raise PackageError(f"{path}: {target.name!r} {problem}")
        versions = [graph.min_onnxruntime for graph in target.graphs]
        versions += [graph.min_onnxruntime for rank in target.ranks for graph in rank.graphs]
        for version in versions:
            if not re.fullmatch(r"\d+\.\d+", version, re.ASCII):
                raise PackageError(f"{path}: min_onnxruntime={version!r} is not a version")


def check_files(
    folder: Path, needed: Iterable[str], files: Iterable[FileInfo], verify_hashes: bool
) -> None:
    """Raises PackageError: a needed file is not listed, or a listed one is not as listed."""
    files = tuple(files)
    listed = {info.path for info in files}
    for name in needed:
        if name not in listed:
            raise PackageError(f"{folder / MANIFEST_FILE} uses {name} but does not list it")
    for info in files:
        path = package_path(folder, info.path)
        try:
            size = path.stat().st_size
        except OSError:
            raise PackageError(f"{path} is missing; export or copy the package again") from None
        if size != info.bytes:
            raise PackageError(
                f"{path} has {size} bytes instead of {info.bytes}; copy the package again"
            )
        if verify_hashes and file_sha256(path) != info.sha256:
            raise PackageError(f"{path} was changed: its SHA-256 differs; copy the package again")


T = TypeVar("T")


def decode_object(kind: type[T], value: Any, where: str) -> T:
    """Build dataclass `kind` from JSON, naming the place where the types do not fit."""
    if not isinstance(value, dict):
        raise PackageError(f"{where}: expected an object")
    hints = typing.get_type_hints(kind)
    names = {f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(value.keys() - names):
        raise PackageError(f"{where}: unknown key {unknown[0]!r}")
    optional = {f.name for f in dataclasses.fields(kind) if f.default is not dataclasses.MISSING}  # type: ignore[arg-type]
    if missing := sorted(names - value.keys() - optional):
        raise PackageError(f"{where}: key {missing[0]!r} is missing")
    given = names & value.keys()
    return kind(**{n: _decode_field(hints[n], value[n], f"{where}: {n}") for n in given})


def _decode_field(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin is tuple:
        if not isinstance(value, list):
            raise PackageError(f"{where}: expected a list")
        item = typing.get_args(hint)[0]
        return tuple(_decode_field(item, v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is types.UnionType:
        inner = next(a for a in typing.get_args(hint) if a is not type(None))
        return None if value is None else _decode_field(inner, value, where)
    if dataclasses.is_dataclass(hint):
        return decode_object(typing.cast(type[Any], hint), value, where)
    if type(value) is not hint:  # exact: a bool is no int here
        raise PackageError(f"{where}: expected {hint.__name__}")
    if hint is int and not 0 <= value <= _MAX_INT:
        raise PackageError(f"{where}: expected a number from 0 to {_MAX_INT}")
    return value
