"""Checks of one option each: its value normalized, or a `ConfigError` with what is expected."""

from __future__ import annotations

import math
import numbers
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Any, cast

from headrace.runtime.errors import ConfigError

Check = Callable[[str, Any], Any]


def integer(low: int, high: int | None = None, *, optional: bool = False) -> Check:
    span = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    expected = span + (" or None" if optional else "")

    def check(name: str, value: Any) -> int | None:
        if optional and value is None:
            return None
        number = as_int(value)
        if number is None or number < low or (high is not None and number > high):
            raise ConfigError(name, value, expected)
        return number

    return check


def number(low: float, high: float, *, optional: bool = False) -> Check:
    """A finite number from `low` to `high`."""
    span = f"of at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
    span += " or None" if optional else ""

    def check(name: str, value: Any) -> float | None:
        if optional and value is None:
            return None
        number = as_float(value)
        if number is None or not low <= number <= high or math.isinf(number):
            raise ConfigError(name, value, f"a number {span}")
        return number

    return check


def positive(name: str, value: Any) -> float:
    number = as_float(value)
    if number is None or number <= 0 or math.isinf(number):
        raise ConfigError(name, value, "a finite number above 0")
    return number


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(name, value, "True or False")
    return value


def named(name: str, value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(name, value, "a name or None")
    return value


def folder(name: str, value: Any) -> str | None:
    """A path, as a string."""
    if value is None:
        return None
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not path:
        raise ConfigError(name, value, "a folder or None")
    return path


def stop_strings(name: str, value: Any) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else as_tuple(value)
    if items is None or not all(isinstance(s, str) and s for s in items):
        raise ConfigError(name, value, "a string or a list of strings, none of them empty")
    return cast(tuple[str, ...], items)


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    items = as_tuple(value)
    ids = None if items is None else [as_int(item) for item in items]
    if ids is None or any(i is None or i < 0 for i in ids):
        raise ConfigError(name, value, "a list of token ids, none of them negative")
    return tuple(cast(list[int], ids))


def logit_bias(name: str, value: Any) -> Mapping[int, float]:
    expected = "a mapping of token ids to finite numbers or minus infinity"
    if not isinstance(value, Mapping):
        raise ConfigError(name, value, expected)
    bias: dict[int, float] = {}
    for key, amount in value.items():
        token_id, number = as_int(key), as_float(amount)
        if token_id is None or token_id < 0 or number is None or number == math.inf:
            raise ConfigError(f"{name}[{key!r}]", amount, expected)
        bias[token_id] = number
    return MappingProxyType(bias)


def as_int(value: Any) -> int | None:
    """The integer that `value` is (numpy's too), or None; a bool is none."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_float(value: Any) -> float | None:
    """The number that `value` is, or None; a bool and NaN are none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return None if math.isnan(number) else number


def as_tuple(value: Any) -> tuple[Any, ...] | None:
    """The items of a list-like value; a string, bytes or mapping is none."""
    if isinstance(value, (str, bytes, bytearray, Mapping)):
        return None
    if isinstance(value, AbstractSet):
        value = sorted(value, key=repr)  # one order whatever the hash seed
    return tuple(value) if isinstance(value, Iterable) else None
