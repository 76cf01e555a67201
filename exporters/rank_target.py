"""`--tensor-parallel N`: a target split between N processes, each with pieces of its own.

Ranks share one weight file. Formats round each rank's part by itself, so that block and row
formats need nothing of another rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import onnx_ir as ir

from headrace.exporters.graph.decoder import DecoderParts
from headrace.exporters.graph.pieces import build_pieces
from headrace.exporters.graph.weights import WeightStore
from headrace.exporters.shards import shard_parts
from headrace.exporters.target_info import MIN_ONNXRUNTIME, WEIGHTS_FILE, graph_info
from headrace.runtime.manifest import (
    CARRIED,
    HEAD_MATRIX,
    PARTIAL,
    RESIDUAL,
    SUMMED,
    KvCacheInfo,
    TargetInfo,
    TensorInfo,
)
from headrace.runtime.rank_info import PiecesInfo, RankInfo
from headrace.runtime.shares import RankShare

_BETWEEN = frozenset((PARTIAL, RESIDUAL, SUMMED, CARRIED))


def write_rank_target(
    package: Path,
    target: TargetInfo,
    make_parts: Callable[[], DecoderParts],
    form: str,
    shares: Sequence[RankShare],
    progress: Callable[[str, int, int], None],
) -> TargetInfo:
    """Write `package/target.name`.

    Args:
        target: what is the same with and without ranks; bytes of the cache are of one process.
        make_parts: of the whole model, with formats that have stored nothing yet.
    """
    folder = package / target.name
    folder.mkdir()
    ranks = []
    with WeightStore(folder, WEIGHTS_FILE) as file:
        stores = file.for_each(len(shares))
        for number, (share, store) in enumerate(zip(shares, stores, strict=True)):
            whole = make_parts()
            parts = shard_parts(whole, share, first=number == 0)
            total = len(shares) * whole.spec.num_layers
            before = number * whole.spec.num_layers
            pieces = _write_pieces(
                folder,
                f"rank{number}.{form}",
                build_pieces(
                    parts,
                    store,
                    form,
                    share.tokens.first,
                    lambda layers, before=before, total=total: progress(  # type: ignore[misc]
                        f"writing ranks of {target.name}", before + layers, total
                    ),
                ),
                form,
            )
            kv_bytes = target.kv_cache.bytes_per_token * share.kv_heads.size
            ranks.append(
                RankInfo(
                    num_heads=share.heads.size,
                    num_kv_heads=share.kv_heads.size,
                    first_token=share.tokens.first,
                    num_tokens=share.tokens.size,
                    kv_bytes_per_token=kv_bytes // whole.spec.num_kv_heads,
                    weight_bytes=store.tensor_bytes,
                    graphs=(pieces,),
                )
            )
        tensors = tuple(_tensors(whole, stores))
        size = file.size_bytes
    return TargetInfo(
        name=target.name,
        device=target.device,
        precision=target.precision,
        kv_cache=KvCacheInfo(
            dtype=target.kv_cache.dtype,
            bytes_per_token=sum(rank.kv_bytes_per_token for rank in ranks),
            block_tokens=target.kv_cache.block_tokens,
        ),
        graphs=(),
        tensors=tensors,
        weight_bytes=size,
        ranks=tuple(ranks),
    )


def _write_pieces(folder: Path, prefix: str, models: Iterable[ir.Model], form: str) -> PiecesInfo:
    files: list[str] = []
    inputs: dict[str, None] = {}
    outputs: dict[str, None] = {}
    for number, model in enumerate(models):
        file = f"{prefix}.{number:03}.onnx"
        ir.save(model, folder / file)
        files.append(f"{folder.name}/{file}")
        info = graph_info(model, form, file)
        inputs |= dict.fromkeys(info.inputs)
        outputs |= dict.fromkeys(info.outputs)
    return PiecesInfo(
        form=form,
        files=tuple(files),
        min_onnxruntime=MIN_ONNXRUNTIME[form],
        inputs=tuple(name for name in inputs if name not in _BETWEEN),
        outputs=tuple(name for name in outputs if name not in _BETWEEN),
    )


def _tensors(whole: DecoderParts, stores: Sequence[WeightStore]) -> Iterator[TensorInfo]:
    """Weights with their shapes in the whole model, and what all ranks store of them."""
    spec = whole.spec
    not_split = (HEAD_MATRIX, f"{spec.positions}.weight")
    sizes = [{name: size for name, _, _, size in store.described()} for store in stores]
    for name, fmt, shape, own_bytes in stores[0].described():
        num_bytes = own_bytes
        if len(shape) == 2 and name not in not_split:
            shape = whole.weight(*name.split("+")).shape
            num_bytes = sum(of_rank[name] for of_rank in sizes)
        yield TensorInfo(name=name, format=fmt, shape=shape, bytes=num_bytes)
