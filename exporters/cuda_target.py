"""`--target`: what a package holds for CUDA, beside its graphs for the CPU or alone.

Weights are rounded to nearest, in the checkpoint's own basis; activations and cache are FP16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from headrace.exporters.archs.spec import DecoderSpec
from headrace.exporters.graph.decoder import PAGED, DecoderParts, build_decoder
from headrace.exporters.graph.linear import BlockFormat, Float16, LinearFormat
from headrace.exporters.graph.paged import block_tokens
from headrace.exporters.graph.weights import WeightStore
from headrace.exporters.target_info import WEIGHTS_FILE, graph_info, tensor_infos
from headrace.runtime.manifest import KvCacheInfo, TargetInfo

_HALF_BYTES = 2


@dataclass(frozen=True, slots=True)
class CudaTarget:
    """`name` is also the folder; `precision` goes into the manifest."""

    name: str
    precision: str
    summary: str
    format: Callable[[], LinearFormat]


def _blocks(name: str, bits: int) -> Callable[[], LinearFormat]:
    return lambda: BlockFormat(name, bits, accuracy_level=0, plain=Float16())


_ALL = (
    CudaTarget("cuda_fp16", "fp16", "FP16 throughout", Float16),
    CudaTarget(
        "cuda_w8", "w8a16_block", "INT8 in blocks of 32 (MatMulNBits)", _blocks("w8a16_block", 8)
    ),
    CudaTarget(
        "cuda_w4",
        "w4a16_block",
        "INT4 in blocks of 32 (MatMulNBits), a tied embedding and head INT8",
        _blocks("w4a16_block", 4),
    ),
)
CUDA_TARGETS: Mapping[str, CudaTarget] = {target.name: target for target in _ALL}


def cuda_target_info(target: CudaTarget, spec: DecoderSpec) -> TargetInfo:
    """What is known of a target before it is written."""
    return TargetInfo(
        name=target.name,
        device="cuda",
        precision=target.precision,
        kv_cache=KvCacheInfo(
            dtype="float16",
            bytes_per_token=_kv_values(spec) * _HALF_BYTES,
            block_tokens=block_tokens(spec.head_dim),
        ),
        graphs=(),
        tensors=(),
        weight_bytes=0,
    )


def cuda_parts(target: CudaTarget, parts: DecoderParts) -> DecoderParts:
    """The same model in the target's format, of which nothing is stored yet.

    Args:
        parts: in the checkpoint's own basis.
    """
    fmt = target.format()
    return dataclasses.replace(parts, layer_format=fmt, head_format=fmt)


def write_cuda_target(
    target: CudaTarget,
    parts: DecoderParts,
    package: Path,
    progress: Callable[[str, int, int], None],
) -> TargetInfo:
    """Write `package/target.name`; nothing there can be run without a card.

    Args:
        parts: in the checkpoint's own basis; their formats are replaced.

    Raises:
        ExportError: the model needs something that CUDA graphs cannot hold.
    """
    spec, formatted = parts.spec, cuda_parts(target, parts)
    folder = package / target.name
    folder.mkdir()
    with WeightStore(folder, WEIGHTS_FILE) as store:
        model = build_decoder(
            formatted,
            store,
            PAGED,
            lambda layers: progress(f"writing {target.name}", layers, spec.num_layers),
        )
        ir.save(model, folder / f"{PAGED}.onnx")
        tensors, size = tensor_infos(store), store.size_bytes
    return dataclasses.replace(
        cuda_target_info(target, spec),
        graphs=(graph_info(model, PAGED, f"{target.name}/{PAGED}.onnx"),),
        tensors=tensors,
        weight_bytes=size,
    )


def _kv_values(spec: DecoderSpec) -> int:
    """Of a token, in all layers."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
