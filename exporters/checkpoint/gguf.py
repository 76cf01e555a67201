"""A GGUF file as a checkpoint: its metadata in config.json keys, its tensors by Hugging Face name.

An architecture that `names.py` does not know still opens, with its own name as `model_type` and
tensors under their GGUF names, so that whoever chooses the graph can say what is supported.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from headrace.exporters.checkpoint.gguf_config import GgufMetadata, read_config, refuse_unread
from headrace.exporters.checkpoint.gguf_data import (
    DataFile,
    RowOrder,
    has_blocks,
    load_blocks,
    load_float32,
)
from headrace.exporters.checkpoint.gguf_header import GgufTensor, read_header
from headrace.exporters.checkpoint.names import (
    ARCHITECTURES,
    GgufArchitecture,
    block_module,
    hf_name,
)
from headrace.exporters.checkpoint.tokenizer_gguf import tokenizer_from_metadata
from headrace.exporters.checkpoint.values import Checkpoint, Config, LazyTensor
from headrace.runtime.errors import CheckpointError

_FACTORS = "rope_freqs.weight"
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file.

    Raises:
        CheckpointError: damaged, truncated, or without what its architecture needs.
    """
    header = read_header(path)
    metadata = GgufMetadata(header.metadata, path)
    name = metadata.text("general.architecture")
    if (parts := metadata.maybe_integer("split.count") or 1) > 1:
        raise CheckpointError(
            f"{path} is one part of {parts}; join them with llama-gguf-split --merge"
        )
    architecture = ARCHITECTURES.get(name)
    if architecture and architecture.windowed and f"{name}.attention.sliding_window" in metadata:
        architecture = architecture.windowed
    stored = {tensor.name: tensor for tensor in header.tensors}
    with ExitStack() as resources:
        file = DataFile(path)
        resources.callback(file.close)
        if architecture is None:
            config = Config(architectures=[name], model_type=name)
            tensors = {n: _lazy(file, t, n, None) for n, t in stored.items()}
        else:
            config = read_config(metadata, architecture, stored)
            _set_factors(file, stored, config, metadata)
            refuse_unread(metadata)
            tensors = _rename(file, stored, architecture, config, path)
        return Checkpoint(
            format="gguf",
            path=path,
            weight_files=(path,),
            config=config,
            tensors=tensors,
            make_tokenizer=partial(tokenizer_from_metadata, metadata),
            resources=resources.pop_all(),
        )


def _rename(
    file: DataFile,
    stored: dict[str, GgufTensor],
    architecture: GgufArchitecture,
    config: Config,
    path: Path,
) -> dict[str, LazyTensor]:
    tensors = {}
    counted = config["num_hidden_layers"]
    present = len({block[0] for block in map(block_module, stored) if block})
    if present != counted:  # a smaller count would silently drop layers
        raise CheckpointError(
            f"{path} is damaged: its metadata counts {counted} layers, it has tensors of {present}"
        )
    for name, tensor in stored.items():
        block = block_module(name)
        module = block[1] if block else None
        if module in architecture.derived:
            continue
        new = hf_name(architecture, name)
        if new is None:
            raise CheckpointError(
                f"{path} has tensor {name!r}, which a plain {architecture.model_type} model does "
                "not have; this variant of the architecture is not supported"
            )
        order = None
        if module is not None and (heads := architecture.interleaved.get(module)):
            order = _half_split_order(tensor, config[heads], path)
        tensors[new] = _lazy(file, tensor, new, order)
        if module in architecture.transposed and len(tensor.shape) == 2:
            tensors[new] = tensors[new].transposed()
        if architecture.gain_offset and len(tensor.shape) == 1:
            tensors[new] = tensors[new].plus(-architecture.gain_offset)
    return tensors


def _lazy(file: DataFile, tensor: GgufTensor, name: str, order: RowOrder | None) -> LazyTensor:
    return LazyTensor(
        name=name,
        shape=tensor.shape,
        dtype=tensor.type.name,
        loader=partial(load_float32, file, tensor, order),
        block_loader=partial(load_blocks, file, tensor, order) if has_blocks(tensor) else None,
    )


def _half_split_order(tensor: GgufTensor, heads: object, path: Path) -> RowOrder:
    """Which stored row each Hugging Face row is.

    Within a head of size d, Hugging Face rotates row i with row i + d/2; llama.cpp stores such a
    pair as rows 2i and 2i + 1.
    """
    rows = tensor.shape[0]
    if not isinstance(heads, int) or rows % (2 * heads):
        raise CheckpointError(
            f"{path} is damaged: tensor {tensor.name!r} has {rows} rows for {heads} heads"
        )
    pairs = np.arange(rows, dtype=np.int64).reshape(heads, rows // heads // 2, 2)
    return pairs.swapaxes(1, 2).reshape(rows)


def _set_factors(
    file: DataFile, stored: dict[str, GgufTensor], config: Config, metadata: GgufMetadata
) -> None:
    """Divisors of inverse frequencies, which are tensors in GGUF: Llama 3.1's and longrope's."""

    def factors(name: str) -> list[float]:
        values: list[float] = load_float32(file, stored.pop(name), None).ravel().tolist()
        return values

    if _FACTORS in stored:
        config["rope_scaling"] = {"rope_type": "frequency_factors", "factors": factors(_FACTORS)}
    if _LONG_FACTORS in stored and _SHORT_FACTORS in stored:
        prefix = f"{metadata.text('general.architecture')}.rope.scaling"
        config["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": factors(_SHORT_FACTORS),
            "long_factor": factors(_LONG_FACTORS),
            "attention_factor": metadata.maybe_number(f"{prefix}.attn_factor") or 1.0,
            "original_max_position_embeddings": metadata.integer(
                f"{prefix}.original_context_length"
            ),
        }
