"""`--precision`: which format each weight is stored in. Data, and rules: the first match wins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from headrace.exporters.graph.linear import BlockFormat, Float32, LinearFormat, RowInt8Format
from headrace.runtime.errors import ConfigError

DEFAULT_PRECISION = "w8a8_row"

# A format remembers what it stored, so each package makes its own.
FORMATS: Mapping[str, Callable[[], LinearFormat]] = {
    "w8a8_row": RowInt8Format,
    "w7a8_row": lambda: RowInt8Format("w7a8_row", 63),
    "w8a8_block": lambda: BlockFormat("w8a8_block", 8),
    "w4a8_block": lambda: BlockFormat("w4a8_block", 4),
    "w4a8_block64": lambda: BlockFormat("w4a8_block64", 4, 64),
    "keep": lambda: BlockFormat("keep", 8, lossless=True),
    "fp32": Float32,
}


@dataclass(frozen=True, slots=True)
class Rule:
    """Weights whose name matches `pattern` are stored as `format`.

    A pattern is one of file names (`*`, `?`, `[]`), case-sensitive. Weights that are stored as one
    carry their names joined by `+`; a pattern may match the whole or a part.
    """

    pattern: str
    format: str

    def matches(self, weight_name: str) -> bool:
        names = [weight_name, *weight_name.split("+")]
        return any(fnmatchcase(name, self.pattern) for name in names)


@dataclass(frozen=True, slots=True)
class Precision:
    """`--precision NAME`.

    Attributes:
        target: the folder in the package.
        format: of every weight that no rule is about.
        rotate: quantized activations need the residual stream rotated (`rotation.py`).
        head: format of the embedding and the head where it is another.
        measured: formats that tensors are raised to by measurement, cheapest first; empty where
            all have the same.
    """

    name: str
    target: str
    summary: str
    format: str
    rotate: bool = False
    head: str | None = None
    measured: tuple[str, ...] = ()

    @property
    def gram_formats(self) -> bool:
        """Whether the format rounds better where it knows what a layer multiplies."""
        return self.format in ("w8a8_row", "w7a8_row", "w4a8_block", "w4a8_block64")

    @property
    def can_be_trained(self) -> bool:
        """Whether it rounds weights to 4 or 8 bits, rather than keep what the checkpoint has."""
        return self.format not in ("keep", "fp32")


_ALL = (
    Precision(
        "w8a8_row",
        "cpu_int8",
        "INT8 weights and activations, a scale a channel and a row",
        "w8a8_row",
        rotate=True,
    ),
    Precision(
        "auto",
        "cpu_auto",
        "w8a8_row, and more bits where that wins much or --quant-threshold asks",
        "w8a8_row",
        rotate=True,
        measured=("w8a8_block", "fp32"),
    ),
    Precision(
        "int4",
        "cpu_int4",
        "INT4 in blocks of 64, the most sensitive tensors, embedding and head INT8",
        "w4a8_block64",
        rotate=True,
        head="w8a8_row",
        measured=("w8a8_row",),
    ),
    Precision(
        "w7a8_row",
        "cpu_int8_reduced",
        "w8a8_row with weights of 7 bits: faster on processors without VNNI",
        "w7a8_row",
        rotate=True,
    ),
    Precision("w8a8_block", "cpu_int8_block", "INT8 in blocks of 32 (MatMulNBits)", "w8a8_block"),
    Precision(
        "w4a8_block",
        "cpu_int4_block",
        "INT4 in blocks of 32 (MatMulNBits), embedding and head INT8",
        "w4a8_block",
    ),
    Precision(
        "keep",
        "cpu_keep",
        "the checkpoint's own 4- and 8-bit blocks; INT8 blocks for the rest",
        "keep",
    ),
    Precision("fp32", "cpu_fp32", "float32 throughout", "fp32"),
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


def parse_rule(text: str) -> Rule:
    """`PATTERN=FORMAT`.

    Raises:
        ConfigError: it is not of that form, or there is no such format.
    """
    pattern, equals, name = text.rpartition("=")
    if not equals or not pattern or name not in FORMATS:
        raise ConfigError("rule", text, f"PATTERN=FORMAT with one of {', '.join(FORMATS)}")
    return Rule(pattern, name)


def check_rules(rules: Sequence[Rule], weight_names: Sequence[str]) -> None:
    """Raises ConfigError: a rule is about none of these weights, stacked or not."""
    for rule in rules:
        parts = [Rule(part, rule.format) for part in rule.pattern.split("+")]
        if not any(part.matches(name) for part in parts for name in weight_names):
            raise ConfigError(
                "rule",
                f"{rule.pattern}={rule.format}",
                f"a pattern that matches a weight, such as {weight_names[-1]}",
            )


def first_match(rules: Sequence[Rule], weight_name: str) -> Rule | None:
    """The rule that decides about a weight."""
    return next((rule for rule in rules if rule.matches(weight_name)), None)
