"""The average of the states that a training goes through (Polyak and Juditsky, 1992).

Where gradients are mostly noise the last state lies off the middle of those before it, and the
middle is the better model.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class RunningAverage:
    """An exponential moving average of each tensor, which begins as the tensor.

    Args:
        decay: how much of the average a step leaves; early steps leave less, so that where the
            training began is soon forgotten.

    Attributes:
        averages: `NAME.average`.
    """

    def __init__(self, tensors: Mapping[str, Tensor], decay: float) -> None:
        self._tensors, self._decay = dict(tensors), decay
        self.averages = {f"{name}.average": tensor.clone() for name, tensor in tensors.items()}

    def follow(self, number: int) -> None:
        """Take in what tensors are after step `number`, from 1."""
        kept = min(self._decay, number / (number + 9))
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                self.averages[f"{name}.average"].lerp_(tensor, 1 - kept)

    def swap(self) -> None:
        """Exchange tensors and averages."""
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                average = self.averages[f"{name}.average"]
                here = tensor.clone()
                tensor.copy_(average)
                average.copy_(here)
