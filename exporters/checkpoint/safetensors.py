"""A Hugging Face folder as a checkpoint: config.json and safetensors files, sharded or not."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from headrace.exporters.checkpoint.hf_config import CONFIG_FILE, full_names, normalize_config
from headrace.exporters.checkpoint.json_files import read_object
from headrace.exporters.checkpoint.pickle_files import PICKLE_SUFFIXES, pickle_refusal
from headrace.exporters.checkpoint.tokenizer_hf import tokenizer_from_folder
from headrace.exporters.checkpoint.values import Checkpoint, Float, LazyTensor
from headrace.runtime.errors import CheckpointError

_INDEX_FILE = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"
_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
_CHUNK_VALUES = 1 << 20


def is_safetensors(head: bytes) -> bool:
    """`head`: the first bytes of a file: uint64 header length, then a JSON object."""
    return len(head) > 8 and head[8:9] == b"{"


def open_folder(folder: Path) -> Checkpoint:
    """Open a folder with config.json and weights.

    Raises:
        CheckpointError: a file is missing or damaged, or the weights are pickle files.
    """
    if (folder / _INDEX_FILE).exists():
        shard_of = _read_index(folder)
        return _open(folder, folder, sorted(set(shard_of.values())), shard_of)
    single = folder / _SINGLE_FILE
    files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise _no_weights(folder)
    return _open(folder, folder, files, None)


def open_file(path: Path) -> Checkpoint:
    """Open one safetensors file; config.json and the tokenizer are beside it."""
    return _open(path, path.parent, [path], None)


def _open(
    path: Path, folder: Path, files: list[Path], shard_of: Mapping[str, Path] | None
) -> Checkpoint:
    raw_config = read_object(folder / CONFIG_FILE)
    with ExitStack() as resources:
        tensors: dict[str, LazyTensor] = {}
        for file in files:
            for name, tensor in open_shard(file, resources).items():
                if shard_of is not None and shard_of.get(name) != file:
                    continue  # the index does not use it
                if name in tensors:
                    raise CheckpointError(
                        f"{path} holds tensor {name!r} in several files and has no {_INDEX_FILE} "
                        "that says which to use; remove the files that do not belong to it"
                    )
                tensors[name] = tensor
        for name, file in (shard_of or {}).items():
            if name not in tensors:
                raise CheckpointError(
                    f"{folder / _INDEX_FILE} promises tensor {name!r} in {file.name!r}, which does "
                    "not have it; download the checkpoint again"
                )
        tensors = full_names(tensors)
        return Checkpoint(
            format="safetensors",
            path=path,
            weight_files=tuple(files),
            config=normalize_config(raw_config, tensors, folder / CONFIG_FILE),
            tensors=tensors,
            make_tokenizer=partial(tokenizer_from_folder, folder, raw_config),
            resources=resources.pop_all(),
        )


def open_shard(file: Path, resources: ExitStack) -> dict[str, LazyTensor]:
    """The tensors of one safetensors file, which stays open as long as `resources`.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        handle = resources.enter_context(safe_open(file, framework="numpy"))
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
        return {
            name: LazyTensor(
                name=name,
                shape=tuple(part.get_shape()),
                dtype=part.get_dtype(),
                loader=partial(_load, handle, name, file),
            )
            for name, part in slices.items()
        }
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} is not a complete safetensors file: {error}; download it again"
        ) from None


def _load(handle: Any, name: str, file: Path) -> Float:
    """Convert a few rows at a time, so that loading needs little more than the result."""
    try:
        part = handle.get_slice(name)
        shape, dtype = tuple(part.get_shape()), part.get_dtype()
        if dtype not in _FLOAT_TYPES:
            raise CheckpointError(
                f"{file}: tensor {name!r} has type {dtype}; weights must be one of "
                f"{', '.join(_FLOAT_TYPES)}, save the checkpoint in one of these"
            )
        values = np.empty(shape, np.float32)
        if values.size == 0 or not shape:
            values[...] = handle.get_tensor(name)
            return values
        step = max(1, _CHUNK_VALUES // (values.size // shape[0]))
        for start in range(0, shape[0], step):
            stop = min(shape[0], start + step)
            values[start:stop] = part[start:stop]
        return values
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file}: tensor {name!r} cannot be read: {error}") from None


def _read_index(folder: Path) -> dict[str, Path]:
    """Tensor name -> shard, as model.safetensors.index.json says."""
    path = folder / _INDEX_FILE
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no 'weight_map'; download it again")
    shard_of: dict[str, Path] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or file in ("", ".", "..") or set(file) & set("/\\:\0"):
            raise CheckpointError(f"{path} names {file!r}, which is not a file in its folder")
        if file.endswith(PICKLE_SUFFIXES):
            raise pickle_refusal(folder / file)
        shard_of[name] = folder / file
    for shard in sorted(set(shard_of.values())):
        if not shard.is_file():
            raise CheckpointError(f"{path} names {shard.name!r}, which is missing; download it")
    return shard_of


def _no_weights(folder: Path) -> CheckpointError:
    names = sorted(entry.name for entry in folder.iterdir())
    if pickles := [name for name in names if name.endswith(PICKLE_SUFFIXES)]:
        return pickle_refusal(folder / pickles[0])
    if ggufs := [name for name in names if name.endswith(".gguf")]:
        return CheckpointError(
            f"{folder} is no Hugging Face folder; give the file itself: {folder / ggufs[0]}"
        )
    return CheckpointError(
        f"{folder} is not a checkpoint: it has no *.safetensors; give a folder with config.json "
        "and *.safetensors, or a .gguf file"
    )
