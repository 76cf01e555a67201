"""Rounding, its gradients and the optimizer of a training, each against another way to get it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.exporters.graph.linear import BlockFormat, RowInt8Format, Weight, mixed_weight
from headrace.exporters.graph.mixing import mix_runs
from headrace.exporters.quant.formats import quantize_blocks_8bit, quantize_row_int8

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch


def random_weight(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((12, 128)).astype(np.float32)


def random_gram() -> np.ndarray:
    rng = np.random.default_rng(1)
    inputs = rng.standard_normal((300, 128)) @ rng.standard_normal((128, 128))
    return np.asarray(inputs.T @ inputs, np.float32)


def as_weight(values: np.ndarray) -> Weight:
    return Weight("w", values.shape, lambda: values, lambda: None, random_gram)


FORMATS = {
    "row INT8": RowInt8Format(),
    "row INT8, reduced": RowInt8Format("w7a8_row", 63),
    "8-bit blocks": BlockFormat("w8a8_block", 8),
    "4-bit blocks": BlockFormat("w4a8_block64", 4, 64),
}


def trained_linear(name: str, *, mixed: bool = False) -> Any:
    from headrace.exporters.train.linear import TrainedLinear

    weight = as_weight(random_weight())
    return TrainedLinear(weight, FORMATS[name], torch.device("cpu"), mixed=mixed)


def test_fake_int8_gives_what_the_formats_dequantize_to() -> None:
    from headrace.exporters.train.fake_quant import fake_int8

    weight = random_weight()
    tensor = torch.from_numpy(weight)
    rows, blocks = fake_int8(tensor, None).numpy(), fake_int8(tensor, 32).numpy()
    np.testing.assert_array_equal(rows, quantize_row_int8(weight).dequantize())
    np.testing.assert_array_equal(blocks, quantize_blocks_8bit(weight, 32).dequantize())


@pytest.mark.parametrize("name", FORMATS)
def test_training_starts_from_what_is_stored_without(name: str) -> None:
    expected = FORMATS[name].quantize(as_weight(random_weight()))
    np.testing.assert_array_equal(trained_linear(name).rounded().numpy(), expected.dequantize())


@pytest.mark.parametrize(
    ("name", "mixed"), [*((name, False) for name in FORMATS), ("row INT8", True)]
)
def test_what_is_stored_is_what_was_computed_with(name: str, mixed: bool) -> None:
    linear = trained_linear(name, mixed=mixed)
    before = linear.rounded().numpy().copy()
    generator = torch.Generator().manual_seed(0)
    for tensor in (linear.weight, linear.scales):  # as a training would move them
        tensor.mul_(1 + 0.1 * torch.randn(tensor.shape, generator=generator))
    assert (linear.rounded().numpy() != before).mean() > 0.5
    values, stored = linear.folded()
    assert stored is not None
    np.testing.assert_array_equal(stored.dequantize(), linear.rounded().numpy())
    in_basis = mix_runs(values) if mixed else values
    np.testing.assert_allclose(in_basis, stored.dequantize(), atol=1e-6)
    weight = Weight("w", values.shape, lambda: values, lambda: None, trained=lambda: stored)
    assert FORMATS[name].quantize(mixed_weight(weight) if mixed else weight) is stored
    others = [fmt for other, fmt in FORMATS.items() if other != name]
    assert all(fmt.quantize(weight) is not stored for fmt in others)


def test_gradients_of_codes() -> None:
    """One where a value is not clipped, none where it is; scales against a difference quotient."""
    from headrace.exporters.train.fake_quant import fake_codes

    weight = torch.tensor([[0.1, -0.4, 5.0, -5.0]], dtype=torch.float64, requires_grad=True)
    scales = torch.tensor([[0.25]], dtype=torch.float64, requires_grad=True)
    zeros = torch.tensor([[8.0]], dtype=torch.float64)
    rounded = fake_codes(weight, scales, zeros, 0, 15)
    assert rounded.tolist() == [[0.0, -0.5, 1.75, -2.0]]
    rounded[0, 2:].sum().backward()
    assert weight.grad.tolist() == [[0, 0, 0, 0]]
    step = 1e-6
    with torch.no_grad():
        moved = fake_codes(weight, scales + step, zeros, 0, 15)[0, 2:].sum()
    assert float(scales.grad) == pytest.approx(float(moved - rounded.detach()[0, 2:].sum()) / step)
    weight.grad = scales.grad = None
    fake_codes(weight, scales, zeros, 0, 15)[0, :2].sum().backward()
    assert weight.grad.tolist() == [[1, 1, 0, 0]]
    # Rounding error over the scale (LSQ): (0 - 0.4) + (-2 + 1.6).
    assert float(scales.grad) == pytest.approx(-0.8)


def test_adam_is_the_published_one() -> None:
    from headrace.exporters.train.adam import Adam

    expected = random_weight().astype(np.float64)
    tensor = torch.from_numpy(random_weight())
    size, rate = 0.7, 0.01
    adam = Adam({"w": tensor}, {"w": size})
    mean, square = np.zeros_like(expected), np.zeros_like(expected)
    for number in range(1, 8):
        gradient = random_weight(number)
        tensor.grad = torch.from_numpy(gradient)
        adam.step(number, rate)
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.95 * square + 0.05 * np.square(gradient.astype(np.float64))
        corrected = mean / (1 - 0.9**number), square / (1 - 0.95**number)
        expected -= rate * size * corrected[0] / np.sqrt(corrected[1])
    np.testing.assert_allclose(tensor.numpy(), expected, atol=1e-6)


def test_the_average_weighs_late_states_most() -> None:
    from headrace.exporters.train.average import RunningAverage

    start, decay = random_weight(), 0.6
    tensor = torch.from_numpy(start.copy())
    average = RunningAverage({"w": tensor}, decay)
    states = [start]
    for number in range(1, 20):
        states.append(random_weight(number))
        tensor.copy_(torch.from_numpy(states[-1]))
        average.follow(number)
    kept = [min(decay, number / (number + 9)) for number in range(1, 20)]
    shares = [np.prod(kept), *((1 - k) * np.prod(kept[i + 1 :]) for i, k in enumerate(kept))]
    assert sum(shares) == pytest.approx(1) and shares[0] < 1e-4 and shares[-1] == max(shares)
    expected = sum(share * state for share, state in zip(shares, states, strict=True))
    average.swap()
    np.testing.assert_allclose(tensor.numpy(), expected, atol=1e-5)
    average.swap()
    np.testing.assert_array_equal(tensor.numpy(), states[-1])
