"""`--precision`: which format each weight is stored in. Data only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace.exporters.graph.linear import BlockFormat, Float32, LinearFormat, RowInt8Format
from headrace.runtime.errors import ConfigError

DEFAULT_PRECISION = "w8a8_row"


@dataclass(frozen=True, slots=True)
class Precision:
    """`make` gives a fresh format for the layers, the embedding and the head.

    A format remembers what it stored, so one serves one package. `target` is the folder in the
    package. `rotate`: quantized activations need the residual stream rotated (`rotation.py`).
    """

    name: str
    target: str
    make: Callable[[], LinearFormat]
    summary: str
    rotate: bool = False


_ALL = (
    Precision(
        "w8a8_row",
        "cpu_int8",
        RowInt8Format,
        "INT8 weights and activations, a scale a channel and a row",
        rotate=True,
    ),
    Precision(
        "w8a8_block",
        "cpu_int8_block",
        lambda: BlockFormat("w8a8_block", 8),
        "INT8 in blocks of 32 (MatMulNBits)",
    ),
    Precision(
        "w4a8_block",
        "cpu_int4_block",
        lambda: BlockFormat("w4a8_block", 4),
        "INT4 in blocks of 32 (MatMulNBits), embedding and head INT8",
    ),
    Precision(
        "keep",
        "cpu_keep",
        lambda: BlockFormat("keep", 8, lossless=True),
        "the checkpoint's own 4- and 8-bit blocks; INT8 blocks for the rest",
    ),
    Precision("fp32", "cpu_fp32", Float32, "float32 throughout"),
)
PRECISIONS: Mapping[str, Precision] = {precision.name: precision for precision in _ALL}


def find_precision(name: str) -> Precision:
    """Precision by name.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in PRECISIONS:
        raise ConfigError("precision", name, f"one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]
