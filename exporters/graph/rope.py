"""Rotary position tables.

RoFormer (Su et al., 2021): the angle of pair i at position t is t * theta^(-2i/dim). Scaled
variants change the inverse frequencies, some the length of the turned vectors, too:

    linear             all are divided by `factor`
    dynamic            plain up to the context that the model was trained on, where a package ends
    llama3             long wavelengths are divided, with a smooth band between (Llama 3.1)
    yarn               the same by number of turns; vectors grow (Peng et al., 2023)
    longrope           each is divided by its own factor, of one list up to the context that the
                       model was trained on and of another beyond (Ding et al., 2024); vectors grow
    frequency_factors  each is divided by its own of the `factors` [dim / 2]: GGUF's form of llama3
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
Float64 = NDArray[np.float64]


def rope_tables(rope: RopeSpec, positions: int) -> tuple[Float, Float]:
    """cos and sin, float32 [positions, table_width], of angle zero beyond dim / 2; of longrope the
    short ones, then the long ones.

    Raises:
        CheckpointError: `rope.scaling` has a value that makes no sense.
    """
    frequencies = inverse_frequencies(rope)
    angles = np.concatenate([np.outer(np.arange(positions), f) for f in frequencies])
    cos, sin = (turn(angles) * attention_factor(rope) for turn in (np.cos, np.sin))
    beyond = ((0, 0), (0, rope.table_width - rope.dim // 2))
    cos, sin = np.pad(cos, beyond, constant_values=1), np.pad(sin, beyond)
    return cos.astype(np.float32), sin.astype(np.float32)


def switch_tokens(rope: RopeSpec) -> int | None:
    """The longest context for the first of two tables; None where there is one."""
    if _kind(rope) != "longrope":
        return None
    return int(_number(rope, "original_max_position_embeddings"))


def inverse_frequencies(rope: RopeSpec) -> list[Float64]:
    """float64 [dim / 2]: one, or for longrope two."""
    plain: Float64 = rope.theta ** -(np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim)
    kind = _kind(rope)
    if kind == "linear":
        return [plain / _number(rope, "factor")]
    if kind == "llama3":
        return [_llama3(plain, rope)]
    if kind == "yarn":
        return [_yarn(plain, rope)]
    if kind == "longrope":
        return [plain / _factors(rope, key, len(plain)) for key in ("short_factor", "long_factor")]
    if kind == "frequency_factors":
        return [plain / _factors(rope, "factors", len(plain))]
    assert kind in (None, "dynamic")
    return [plain]


def attention_factor(rope: RopeSpec) -> float:
    """What turned vectors are multiplied with."""
    kind = _kind(rope)
    if kind not in ("yarn", "longrope"):
        return 1.0
    if (rope.scaling or {}).get("attention_factor") is not None:
        return _number(rope, "attention_factor")
    factor = _number(rope, "factor")
    if factor <= 1:
        return 1.0
    if kind == "longrope":
        trained = _number(rope, "original_max_position_embeddings")
        return math.sqrt(1 + math.log(factor) / math.log(trained))

    def growth(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1

    scales = [(rope.scaling or {}).get(key) for key in ("mscale", "mscale_all_dim")]
    if not all(scales):
        return growth(1)
    return growth(_number(rope, "mscale")) / growth(_number(rope, "mscale_all_dim"))


def _llama3(plain: Float64, rope: RopeSpec) -> Float64:
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


def _yarn(plain: Float64, rope: RopeSpec) -> Float64:
    """Pairs that turn more than `beta_fast` times in the first context stay as they are, those
    that turn less than `beta_slow` times are divided, between them it is mixed."""
    factor = _number(rope, "factor")
    trained = _number(rope, "original_max_position_embeddings")
    truncated = (rope.scaling or {}).get("truncate") is not False

    def pair_that_turns(times: float) -> float:
        turns = math.log(trained / (times * 2 * math.pi))
        return rope.dim * turns / (2 * math.log(rope.theta))

    first = pair_that_turns(_number(rope, "beta_fast", 32.0))
    last = pair_that_turns(_number(rope, "beta_slow", 1.0))
    if truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dim - 1)
    width = last - first or 0.001
    divided: Float64 = np.clip((np.arange(len(plain)) - first) / width, 0, 1)
    return np.asarray(plain * (1 - divided + divided / factor))


def _kind(rope: RopeSpec) -> object:
    return None if rope.scaling is None else rope.scaling.get("rope_type", rope.scaling.get("type"))


def _number(rope: RopeSpec, key: str, default: float | None = None) -> float:
    value = (rope.scaling or {}).get(key, default)
    if not is_positive_number(value):
        raise CheckpointError(f"rope_scaling: {key}={value!r} is not a positive number")
    return float(cast(Any, value))


def _factors(rope: RopeSpec, key: str, count: int) -> Float64:
    values = (rope.scaling or {}).get(key)
    if not isinstance(values, list) or len(values) != count:
        raise CheckpointError(f"rope_scaling: {key} is not a list of {count} numbers")
    if wrong := [value for value in values if not is_positive_number(value)]:
        raise CheckpointError(f"rope_scaling: {key} holds {wrong[0]!r}, not a positive number")
    return np.array(values, np.float64)
