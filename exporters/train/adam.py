"""Adam (Kingma and Ba, 2015) with a rate for each tensor, and its state in plain tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_BETA_1, _BETA_2, _EPSILON = 0.9, 0.95, 1e-12


class Adam:
    """Moves each tensor by about `rate` x its unit a step.

    Args:
        units: by name of the tensor.

    Attributes:
        averages: `NAME.mean` and `NAME.square`, the decaying averages of gradients.
    """

    def __init__(self, tensors: Mapping[str, Tensor], units: Mapping[str, float]) -> None:
        self._tensors, self._units = dict(tensors), dict(units)
        self.averages = {
            f"{name}.{part}": torch.zeros_like(tensor)
            for name, tensor in tensors.items()
            for part in ("mean", "square")
        }

    def step(self, number: int, rate: float) -> None:
        """Step `number`, from 1, along the gradients that the tensors have."""
        with torch.no_grad():
            for name in self._tensors:
                self._move(name, number, rate)

    def _move(self, name: str, number: int, rate: float) -> None:
        tensor, grad = self._tensors[name], self._tensors[name].grad
        mean, square = self.averages[f"{name}.mean"], self.averages[f"{name}.square"]
        mean.lerp_(grad, 1 - _BETA_1)
        square.mul_(_BETA_2).addcmul_(grad, grad, value=1 - _BETA_2)
        deviation = square.sqrt().div_((1 - _BETA_2**number) ** 0.5).add_(_EPSILON)
        size = rate * self._units[name] / (1 - _BETA_1**number)
        tensor.addcdiv_(mean, deviation, value=-size)
