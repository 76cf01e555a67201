"""Rotary position tables.

RoFormer (Su et al., 2021): the angle of pair i at position t is t * theta^(-2i/dim). Scaled
variants change the inverse frequencies: "linear" divides them by `factor`; "llama3" divides only
long wavelengths, with a smooth band between (Llama 3.1 reference); "frequency_factors" divides each
by its own of the `factors` [dim / 2], which is how a GGUF file stores the same.
"""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from headrace.exporters.archs.config_keys import is_positive_number
from headrace.exporters.archs.spec import RopeSpec
from headrace.runtime.errors import CheckpointError

Float = NDArray[np.float32]


def rope_tables(rope: RopeSpec, positions: int) -> tuple[Float, Float]:
    """cos and sin, float32 [positions, dim / 2]."""
    angles = np.outer(np.arange(positions, dtype=np.float64), inverse_frequencies(rope))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def inverse_frequencies(rope: RopeSpec) -> NDArray[np.float64]:
    """float64 [dim / 2].

    Raises:
        CheckpointError: `rope_scaling` is of an unknown type or has a value that makes no sense.
    """
    plain = rope.theta ** -(np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim)
    if rope.scaling is None:
        return plain
    kind = rope.scaling.get("rope_type", rope.scaling.get("type"))
    if kind == "linear":
        return plain / _number(rope, "factor")
    if kind == "llama3":
        return _llama3(plain, rope)
    if kind == "frequency_factors":
        return plain / _factors(rope, len(plain))
    raise CheckpointError(
        f"rope_scaling type {kind!r} is not supported; known: linear, llama3, frequency_factors"
    )


def _llama3(plain: NDArray[np.float64], rope: RopeSpec) -> NDArray[np.float64]:
    factor = _number(rope, "factor")
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    trained = _number(rope, "original_max_position_embeddings")
    if low >= high:
        raise CheckpointError(
            f"rope_scaling: low_freq_factor={low:g} is not below high_freq_factor={high:g}"
        )
    wavelengths = 2 * math.pi / plain
    smooth = np.clip((trained / wavelengths - low) / (high - low), 0, 1)
    return plain * (smooth + (1 - smooth) / factor)


def _number(rope: RopeSpec, key: str) -> float:
    value = (rope.scaling or {}).get(key)
    if not is_positive_number(value):
        raise CheckpointError(f"rope_scaling: {key}={value!r} is not a positive number")
    return float(cast(Any, value))


def _factors(rope: RopeSpec, count: int) -> NDArray[np.float64]:
    values = (rope.scaling or {}).get("factors")
    if not isinstance(values, list) or len(values) != count:
        raise CheckpointError(f"rope_scaling: factors is not a list of {count} numbers")
    if wrong := [value for value in values if not is_positive_number(value)]:
        raise CheckpointError(f"rope_scaling: factors holds {wrong[0]!r}, not a positive number")
    return np.array(values, np.float64)
