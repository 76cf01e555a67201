"""What rounding to an exported format does to a tensor, as functions that torch can differentiate.

Forward passes give exactly the values that `exporters.quant.formats` dequantizes to (twins tested).
Backward passes use the straight-through estimator (Bengio et al., 2013): rounding has slope one
where it does not clip. Scales of weights are learned with the gradient of LSQ (Esser et al., 2020).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_TINY = 1e-30
_EIGHT_BIT_MAX = 127


class _StraightThrough(torch.autograd.Function):  # type: ignore[misc]
    """`rounded` in place of `x`, with the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def fake_int8(x: Tensor, block_size: int | None) -> Tensor:
    """x [..., n] rounded to symmetric INT8 with one scale a row, or a block of the row.

    A scale is absmax / 127, as kernels choose it for activations. `block_size` None is a whole row,
    and has to divide n otherwise.
    """
    with torch.no_grad():
        blocks = x if block_size is None else x.unflatten(-1, (-1, block_size))
        scales = blocks.abs().amax(-1, keepdim=True).clamp_min(_TINY) / _EIGHT_BIT_MAX
        rounded = (torch.round(blocks / scales) * scales).view_as(x)
    result: Tensor = _StraightThrough.apply(x, rounded)
    return result


class _Codes(torch.autograd.Function):  # type: ignore[misc]
    """Arguments of `fake_codes`, in blocks."""

    @staticmethod
    def forward(
        ctx: Any, blocks: Tensor, scales: Tensor, zeros: Tensor, low: int, high: int
    ) -> Tensor:
        ctx.save_for_backward(blocks, scales, zeros)
        ctx.ends = low, high
        codes = (torch.round(blocks / scales) + zeros).clamp_(low, high)
        return codes.sub_(zeros).mul_(scales)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        blocks, scales, zeros = ctx.saved_tensors
        grad = grads[0]
        exact = blocks / scales
        unclipped = torch.round(exact)
        codes = (unclipped + zeros).clamp_(*ctx.ends).sub_(zeros)
        inside = codes == unclipped
        by_scale = codes.sub_(exact.mul_(inside)).mul_(grad).sum(-1, keepdim=True)
        return grad * inside, by_scale, None, None, None


def fake_codes(weight: Tensor, scales: Tensor, zeros: Tensor, low: int, high: int) -> Tensor:
    """weight [out, in] rounded to whole codes in [low, high] with given scales and zero points.

    `scales` and `zeros` are [out, blocks]; zeros hold whole numbers. value = (code - zero) * scale
    with code = clip(round(weight / scale) + zero, low, high). Differentiable in the weight and the
    scales.
    """
    blocks = weight.unflatten(1, (scales.shape[1], -1))
    rounded: Tensor = _Codes.apply(blocks, scales.unsqueeze(2), zeros.unsqueeze(2), low, high)
    return rounded.flatten(1)
