"""Medusa heads in the format of their reference implementation (Cai et al., 2024).

    config.json                 medusa_num_heads, medusa_num_layers, base_model_name_or_path
    medusa_lm_head.safetensors  {head}.{block}.linear.weight [hidden, hidden], .linear.bias;
                                {head}.{blocks}.weight [vocab, hidden] where a head has an output
                                matrix of its own; without it, it has the model's
                                token_map int64 [n], where heads choose among some tokens only

From the last hidden state h (after the final norm) of the text up to a token, whose next token the
model's own head gives, head k = 0, 1, ... guesses the token k places behind that:

    h <- h + silu(W h + b) for each block;  logits = output h

`token_map` is not in the reference; vLLM knows it by that name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from headrace.exporters.checkpoint.json_files import read_object
from headrace.exporters.checkpoint.pickle_files import pickle_refusal
from headrace.exporters.checkpoint.safetensors import open_shard
from headrace.exporters.checkpoint.values import Float, LazyTensor
from headrace.runtime.errors import CheckpointError, ExportError

WEIGHTS_FILE = "medusa_lm_head.safetensors"
CONFIG_FILE = "config.json"
_TOKEN_MAP = "token_map"
_MAX_HEADS = 16


@dataclass(frozen=True, slots=True)
class Block:
    """weight float32 [hidden, hidden], bias float32 [hidden]."""

    weight: Float
    bias: Float


@dataclass(frozen=True, slots=True)
class Head:
    """Residual blocks, and an output matrix float32 [vocab, hidden] unless that is the model's."""

    blocks: tuple[Block, ...]
    output: Float | None = None


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of one model.

    Attributes:
        token_map: int64, rising: the tokens that they choose among; None for all.
        base_model: what config.json says that they are for.
    """

    heads: tuple[Head, ...]
    token_map: NDArray[np.int64] | None = None
    base_model: str = ""


def read_heads(folder: Path, hidden_size: int, vocab_size: int) -> Heads:
    """Read and check heads for a model of that shape.

    Raises:
        CheckpointError: a file is missing or damaged, or the heads are of another model.
    """
    config = read_object(folder / CONFIG_FILE)
    num_heads, num_blocks = (
        _count(config, name, folder) for name in ("medusa_num_heads", "medusa_num_layers")
    )
    file = folder / WEIGHTS_FILE
    if not file.exists() and (pickle := file.with_suffix(".pt")).exists():
        raise pickle_refusal(pickle)
    with ExitStack() as resources:
        tensors = open_shard(file, resources)
        reader = _Reader(file, tensors, hidden_size, vocab_size)
        heads = tuple(reader.head(number, num_blocks) for number in range(num_heads))
        token_map = reader.token_map()
        if unread := sorted(tensors.keys() - reader.seen):
            raise CheckpointError(
                f"{file} holds tensor {unread[0]!r}, which {CONFIG_FILE} says nothing of; "
                "correct medusa_num_heads and medusa_num_layers"
            )
    return Heads(heads, token_map, str(config.get("base_model_name_or_path", "")))


def write_heads(folder: Path, heads: Heads) -> None:
    """Write a folder that `read_heads` and the reference read; weights are halves.

    Raises:
        ExportError: it cannot be written.
    """
    tensors: dict[str, NDArray[np.generic]] = {}
    for number, head in enumerate(heads.heads):
        for place, block in enumerate(head.blocks):
            tensors[f"{number}.{place}.linear.weight"] = _half(block.weight)
            tensors[f"{number}.{place}.linear.bias"] = _half(block.bias)
        if head.output is not None:
            tensors[f"{number}.{len(head.blocks)}.weight"] = _half(head.output)
    if heads.token_map is not None:
        tensors[_TOKEN_MAP] = heads.token_map
    config = {
        "medusa_num_heads": len(heads.heads),
        "medusa_num_layers": len(heads.heads[0].blocks),
        "base_model_name_or_path": heads.base_model,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{WEIGHTS_FILE}.partial"
        save_file(tensors, partial)
        partial.replace(folder / WEIGHTS_FILE)
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ExportError(f"cannot write {folder}: {error}") from None


class _Reader:
    """Takes tensors out of a file and remembers which."""

    def __init__(
        self, file: Path, tensors: Mapping[str, LazyTensor], hidden_size: int, vocab_size: int
    ) -> None:
        self._file, self._tensors = file, tensors
        self._hidden, self._vocab = hidden_size, vocab_size
        self.seen: set[str] = set()

    def head(self, number: int, num_blocks: int) -> Head:
        blocks = tuple(
            Block(
                self._load(f"{number}.{place}.linear.weight", (self._hidden, self._hidden)),
                self._load(f"{number}.{place}.linear.bias", (self._hidden,)),
            )
            for place in range(num_blocks)
        )
        name = f"{number}.{num_blocks}.weight"
        if name not in self._tensors:
            return Head(blocks)
        return Head(blocks, self._load(name, (self._vocab, self._hidden)))

    def token_map(self) -> NDArray[np.int64] | None:
        if _TOKEN_MAP not in self._tensors:
            return None
        self.seen.add(_TOKEN_MAP)
        with safe_open(self._file, framework="numpy") as handle:
            found = np.asarray(handle.get_tensor(_TOKEN_MAP), np.int64)
        if found.ndim != 1 or not found.size or (np.diff(found) <= 0).any():
            raise CheckpointError(f"{self._file}: {_TOKEN_MAP} is no rising list of tokens")
        if found[0] < 0 or found[-1] >= self._vocab:
            raise CheckpointError(
                f"{self._file}: {_TOKEN_MAP} has tokens that the model's {self._vocab} lack; "
                "these are the heads of another model"
            )
        return found

    def _load(self, name: str, shape: tuple[int, ...]) -> Float:
        if (tensor := self._tensors.get(name)) is None:
            raise CheckpointError(f"{self._file} lacks tensor {name!r}; correct {CONFIG_FILE}")
        self.seen.add(name)
        if tensor.shape != shape:
            raise CheckpointError(
                f"{self._file}: tensor {name!r} has shape {list(tensor.shape)} where the model "
                f"needs {list(shape)}; these are the heads of another model"
            )
        values = tensor.load()
        if not np.isfinite(values).all():
            raise CheckpointError(f"{self._file}: tensor {name!r} holds values that are not finite")
        return values


def _half(values: Float) -> NDArray[np.float16]:
    """In C order, which is what safetensors takes an array to have."""
    return np.ascontiguousarray(values, np.float16)


def _count(config: Mapping[str, object], name: str, folder: Path) -> int:
    value = config.get(name)
    if type(value) is not int or not 1 <= value <= _MAX_HEADS:
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: {name}={value!r} should be a number from 1 to {_MAX_HEADS}"
        )
    return value
