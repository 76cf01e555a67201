"""Typed access to a checkpoint's config.json. Unknown keys are tolerated, wrong ones are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from headrace.runtime.errors import CheckpointError

_MAX_SIZE = 2**31 - 1
_MAX_NUMBER = 1e30


def get_int(config: Mapping[str, object], key: str, default: int | None = None) -> int:
    """A positive integer; `default` where the key is missing or null."""
    value = config.get(key)
    if value is None:
        if default is None:
            raise CheckpointError(f"config.json has no {key!r}")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MAX_SIZE:
        raise CheckpointError(f"config.json: {key}={value!r} is not a positive integer")
    return value


def get_float(config: Mapping[str, object], key: str, default: float) -> float:
    """A positive finite number."""
    value = config.get(key)
    if value is None:
        return default
    if not is_positive_number(value):
        raise CheckpointError(f"config.json: {key}={value!r} is not a positive number")
    return float(cast(Any, value))


def is_positive_number(value: object) -> bool:
    """An int or float that is finite and of a size that means something."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 1 / _MAX_NUMBER < value < _MAX_NUMBER


def get_bool(config: Mapping[str, object], key: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {key}={value!r} is not true or false")
    return value


def get_scaling(config: Mapping[str, object]) -> dict[str, object] | None:
    """`rope_scaling` or, in newer files, `rope_parameters`; None where it scales nothing."""
    value = config.get("rope_scaling") or config.get("rope_parameters")
    if value is None:
        return None
    if not isinstance(value, dict):
        raise CheckpointError(f"config.json: rope_scaling={value!r} is not an object")
    kind = value.get("rope_type", value.get("type"))
    return None if kind in (None, "default") else cast(dict[str, object], value)


def require_value(config: Mapping[str, object], key: str, expected: object) -> None:
    """The key is missing or has the one value that this architecture's graph is built for."""
    value = config.get(key)
    if value is not None and value != expected:
        raise CheckpointError(
            f"config.json: {key}={value!r} is not supported here; only {expected!r} is"
        )
