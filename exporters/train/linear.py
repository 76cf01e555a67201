"""Linear layers as torch sees them: a trained weight that is rounded on every use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from headrace.exporters.graph.functions import MIX_WIDTH
from headrace.exporters.graph.linear import (
    BlockFormat,
    LinearFormat,
    RowInt8Format,
    Weight,
    mixed_weight,
)
from headrace.exporters.graph.mixing import mixing_matrix, unmix_runs
from headrace.exporters.quant.formats import Blocks, Float, RowInt8, pack_nibbles, unpack_nibbles
from headrace.exporters.train.fake_quant import fake_codes, fake_int8

_REACH = 0.4  # of a code's range of 1, on either side


@dataclass(frozen=True, slots=True)
class InputRounding:
    """What a product does to its input, float32 [..., in].

    Attributes:
        quantized: it is rounded to 8 bits, in blocks of `block_size` or, if that is None, by row.
        mixed: runs of MIX_WIDTH values are multiplied by a Hadamard matrix before.
    """

    quantized: bool = False
    block_size: int | None = None
    mixed: bool = False

    def apply(self, x: Tensor, mix: Tensor) -> Tensor:
        """`mix` is `mixing_matrix()`."""
        if self.mixed:
            x = (x.unflatten(-1, (-1, MIX_WIDTH)) @ mix).flatten(-2)
        return fake_int8(x, self.block_size) if self.quantized else x


def post_training(
    fmt: LinearFormat, weight: Weight, *, mixed: bool = False, embedding: bool = False
) -> tuple[InputRounding, RowInt8 | Blocks | None]:
    """What `fmt` does to inputs, and what it stores without training; None if that is float32."""
    if isinstance(fmt, RowInt8Format):
        rows = fmt.quantize(mixed_weight(weight) if mixed else weight)
        return InputRounding(True, None, mixed), rows
    if isinstance(fmt, BlockFormat) and (blocks := fmt.quantize(weight, embedding=embedding)):
        return InputRounding(fmt.quantizes_activations, blocks.block_size), blocks
    return InputRounding(), None


class TrainedLinear:
    """y = x W' (+ bias) with W' the trained weight, rounded.

    It starts from what `fmt` makes of `weight` without training.

    Args:
        biases: of the parts of a stacked weight; trained elsewhere.
        mixed: the format mixes the inputs; the weight is held in that basis.

    Attributes:
        weight: float32 [out, in], trained.
        scales: float32 [out, blocks], trained; None where the format stores float32.
        zeros: float32 [out, blocks] of whole numbers, fixed; None without scales.
    """

    def __init__(
        self,
        weight: Weight,
        fmt: LinearFormat,
        device: torch.device,
        biases: Sequence[Tensor] = (),
        *,
        mixed: bool = False,
    ) -> None:
        self._input, start = post_training(fmt, weight, mixed=mixed)
        self._biases = list(biases)
        self._mix = torch.from_numpy(mixing_matrix()).to(device)
        self._start = start
        values = mixed_weight(weight).load() if mixed else weight.load()
        self.scales: Tensor | None = None
        self.zeros: Tensor | None = None
        if start is not None:
            scales, zeros = _grid(start)
            self.scales = torch.from_numpy(scales.copy()).to(device)
            self.zeros = torch.from_numpy(zeros).to(device)
            values = _inside(values, start.dequantize(), scales)
        self.weight = torch.from_numpy(np.array(values, np.float32)).to(device)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        bias = torch.cat(self._biases) if self._biases else None
        return functional.linear(self._input.apply(x, self._mix), self.rounded(), bias)

    def rounded(self) -> Tensor:
        """What inputs are multiplied with, float32 [out, in]."""
        if self._start is None:
            return self.weight
        return fake_codes(self.weight, self.scales, self.zeros, *_ends(self._start))

    def folded(self) -> tuple[Float, RowInt8 | Blocks | None]:
        """float32 [out, in], not mixed, and what the format is to store of it."""
        weight = _numpy(self.weight)
        if self._start is None:
            return weight, None
        stored = _stored(weight, _numpy(self.scales), _numpy(self.zeros), self._start)
        values = stored.dequantize()
        return unmix_runs(values) if self._input.mixed else values, stored


def _grid(start: RowInt8 | Blocks) -> tuple[Float, Float]:
    """Scales and zero points, float32 [out, blocks]."""
    if isinstance(start, RowInt8):
        return start.scales[:, None], np.zeros((len(start.scales), 1), np.float32)
    if start.zero_points is None:
        return start.scales, np.full_like(start.scales, 1 << (start.bits - 1))
    assert start.zero_points.dtype == np.uint8, "formats choose whole zero points"
    packed: NDArray[np.uint8] = start.zero_points.view(np.uint8)
    return start.scales, unpack_nibbles(packed)[:, : start.scales.shape[1]].astype(np.float32)


def _ends(start: RowInt8 | Blocks) -> tuple[int, int]:
    """The smallest and the largest code."""
    if isinstance(start, RowInt8):
        return -start.max_code, start.max_code
    return 0, (1 << start.bits) - 1


def _stored(
    weight: Float, scales: Float, zeros: Float, start: RowInt8 | Blocks
) -> RowInt8 | Blocks:
    """What `fake_codes` rounds to, in the form of `start`."""
    split = weight.reshape(*scales.shape, -1)
    codes = np.clip(np.rint(split / scales[:, :, None]) + zeros[:, :, None], *_ends(start))
    if isinstance(start, RowInt8):
        rows = codes.reshape(weight.shape).astype(np.int8)
        return RowInt8(rows, scales[:, 0].copy(), start.max_code)
    unsigned = codes.astype(np.uint8)
    packed = pack_nibbles(unsigned) if start.bits == 4 else unsigned
    return Blocks(start.bits, start.block_size, packed, scales, start.zero_points)


def _inside(weight: Float, rounded: Float, scales: Float) -> Float:
    """The weight, moved no further than needed to be rounded to the same codes.

    GPTQ rounds many weights away from the nearest code. Those go to the near end of the code's
    range, but not to its very edge, or the first moves would undo GPTQ everywhere at once.
    """
    reach = np.float32(_REACH) * np.repeat(scales, weight.shape[1] // scales.shape[1], axis=1)
    return np.asarray(np.clip(weight, rounded - reach, rounded + reach), np.float32)


def _numpy(tensor: Tensor) -> Float:
    return np.array(tensor.detach().cpu().numpy(), np.float32)
