"""The checkpoint as the graph builder sees it: weights, some of them stacked."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from headrace.exporters.checkpoint.values import LazyTensor, QuantBlocks
from headrace.exporters.graph.linear import Weight
from headrace.exporters.quant.formats import Blocks, pack_nibbles
from headrace.runtime.errors import CheckpointError

Float = NDArray[np.float32]


class WeightSource:
    """Finds and checks tensors; reads them one at a time."""

    def __init__(self, tensors: Mapping[str, LazyTensor]) -> None:
        self._tensors = tensors

    def weight(self, *names: str) -> Weight:
        """A matrix, or several stacked along their outputs; names without `.weight`."""
        parts = [self._tensors[f"{name}.weight"] for name in names]
        for part in parts:
            if len(part.shape) != 2 or part.shape[1] != parts[0].shape[1]:
                raise CheckpointError(f"tensor {part.name} has the unexpected shape {part.shape}")
        shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        return Weight("+".join(names), shape, lambda: _stack(parts), lambda: _stacked_blocks(parts))

    def vector(self, name: str) -> Float:
        """A one-dimensional tensor by its full name."""
        tensor = self._tensors[name]
        if len(tensor.shape) != 1:
            raise CheckpointError(f"tensor {name} has the unexpected shape {tensor.shape}")
        return _finite(tensor)


def _finite(tensor: LazyTensor) -> Float:
    values = tensor.load()
    if not np.isfinite(values).all():
        raise _not_finite(tensor.name)
    return values


def _finite_blocks(name: str, blocks: QuantBlocks) -> QuantBlocks:
    parts = (blocks.scales,) if blocks.offsets is None else (blocks.scales, blocks.offsets)
    if not all(np.isfinite(part).all() for part in parts):
        raise _not_finite(name)
    return blocks


def _not_finite(name: str) -> CheckpointError:
    return CheckpointError(
        f"tensor {name} holds values that are not finite; the checkpoint is damaged"
    )


def _stack(parts: list[LazyTensor]) -> Float:
    if len(parts) == 1:
        return _finite(parts[0])
    return np.concatenate([_finite(part) for part in parts])


def _stacked_blocks(parts: list[LazyTensor]) -> Blocks | None:
    """The parts' own blocks in MatMulNBits layout, if all have the same kind of them."""
    converted = [
        matmul_blocks(_finite_blocks(part.name, blocks))
        for part in parts
        if (blocks := part.blocks()) is not None
    ]
    kinds = {(b.bits, b.block_size, b.zero_points is None) for b in converted}
    if len(converted) < len(parts) or len(kinds) != 1:
        return None
    first = converted[0]
    zero = None
    if first.zero_points is not None:
        zero = np.concatenate([b.zero_points for b in converted if b.zero_points is not None])
    return Blocks(
        first.bits,
        first.block_size,
        np.concatenate([b.codes for b in converted]),
        np.concatenate([b.scales for b in converted]),
        zero,
    )


def matmul_blocks(source: QuantBlocks) -> Blocks:
    """Checkpoint blocks as MatMulNBits wants them; nothing is rounded to another code.

    An offset becomes a float zero point, -offset / scale. A block without a scale holds one value
    only: it becomes code 1, zero point 0 and that value as scale.
    """
    out, blocks = source.scales.shape
    codes = source.codes.reshape(out, blocks, source.block_size)
    scales = source.scales
    zero: Float | None = None
    if source.offsets is None:
        unsigned = (codes.astype(np.int16) + (1 << (source.bits - 1))).astype(np.uint8)
    else:
        unsigned = codes.astype(np.uint8)
        constant = scales == 0
        unsigned[constant] = 1
        scales = np.where(constant, source.offsets, scales)
        zero = np.where(constant, 0, -source.offsets / np.where(scales == 0, 1, scales))
        zero = zero.astype(np.float32)
    packed = pack_nibbles(unsigned) if source.bits == 4 else unsigned
    return Blocks(source.bits, source.block_size, packed, scales.astype(np.float32), zero)
