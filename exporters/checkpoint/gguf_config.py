"""GGUF metadata with types checked, and config.json keys made of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np

from headrace.exporters.checkpoint.gguf_header import GgufTensor, Value
from headrace.exporters.checkpoint.names import GgufArchitecture
from headrace.exporters.checkpoint.values import Config, MissingEntryError
from headrace.runtime.errors import CheckpointError

T = TypeVar("T")

_EMBEDDING = "token_embd.weight"
# They repeat what tensors say, or are about training.
_INERT = frozenset(
    {"vocab_size", "rope.scaling.finetuned", "attention.causal", "expert_used_count"}
)


class GgufMetadata:
    """Typed look-ups; each names the key when it is missing or of another type.

    The `maybe_` twins give None where the key is missing.
    """

    def __init__(self, values: Mapping[str, Value], path: Path) -> None:
        self._values, self.path = values, path
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def text(self, key: str) -> str:
        return self._needed(key, self.maybe_text(key))

    def maybe_text(self, key: str) -> str | None:
        value = self._get(key)
        if value is None or isinstance(value, str):
            return value
        raise self._wrong(key, "text")

    def integer(self, key: str) -> int:
        return self._needed(key, self.maybe_integer(key))

    def maybe_integer(self, key: str) -> int | None:
        """Also an array of equal integers: some files repeat a value for every layer."""
        value = self._get(key)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and len(set(value)) == 1:
            value = value[0].item()
        if value is None or type(value) is int:
            return value
        raise self._wrong(key, "a whole number")

    def number(self, key: str) -> int | float:
        return self._needed(key, self.maybe_number(key))

    def maybe_number(self, key: str) -> int | float | None:
        value = self._get(key)
        if value is None or type(value) is int or type(value) is float:
            return value
        raise self._wrong(key, "a number")

    def maybe_flag(self, key: str) -> bool | None:
        value = self._get(key)
        if value is None or isinstance(value, bool):
            return value
        raise self._wrong(key, "true or false")

    def texts(self, key: str) -> list[str]:
        return self._needed(key, self.maybe_texts(key))

    def maybe_texts(self, key: str) -> list[str] | None:
        value = self._get(key)
        if value is None:
            return None
        if isinstance(value, np.ndarray) and value.size == 0:
            return []  # an empty list may carry any item type
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return value  # type: ignore[return-value]
        raise self._wrong(key, "a list of texts")

    def maybe_numbers(self, key: str, kinds: str) -> list[float] | None:
        """`kinds`: numpy dtype kinds to take, "iu" for integers, "f" for floats, "b" for flags."""
        value = self._get(key)
        if value is None:
            return None
        if isinstance(value, np.ndarray) and value.dtype.kind in kinds:
            numbers: list[float] = value.tolist()
            return numbers
        raise self._wrong(key, "a list of numbers")

    def unread(self, prefix: str) -> dict[str, Value]:
        """What nobody asked for, of keys that begin with `prefix`."""
        return {
            key: value
            for key, value in self._values.items()
            if key.startswith(prefix) and key not in self._read
        }

    def _get(self, key: str) -> Value | None:
        self._read.add(key)
        return self._values.get(key)

    def _needed(self, key: str, value: T | None) -> T:
        if value is None:
            raise MissingEntryError(f"{self.path} has no metadata key {key!r}; convert it again")
        return value

    def _wrong(self, key: str, expected: str) -> CheckpointError:
        value = repr(self._values[key])
        shown = value if len(value) <= 40 else value[:40] + "..."
        return CheckpointError(f"{self.path}: metadata key {key!r} is {shown}, not {expected}")


def read_config(
    metadata: GgufMetadata, architecture: GgufArchitecture, tensors: Mapping[str, GgufTensor]
) -> Config:
    """config.json keys of a known architecture.

    Raises:
        CheckpointError: a key or the embedding is missing, or a value makes no sense.
    """
    prefix = metadata.text("general.architecture")
    if _EMBEDDING not in tensors:
        raise MissingEntryError(f"{metadata.path} has no tensor {_EMBEDDING!r}; convert it again")

    def size(key: str, default: int | None = None) -> int:
        value = metadata.maybe_integer(f"{prefix}.{key}")
        if value is None:
            value = metadata.integer(f"{prefix}.{key}") if default is None else default
        if not 0 < value < 2**31:
            raise CheckpointError(f"{metadata.path}: {prefix}.{key} is {value}, not a size")
        return value

    heads, hidden = size("attention.head_count"), size("embedding_length")
    width = max(1, hidden // heads)
    turned = metadata.maybe_integer(f"{prefix}.rope.dimension_count")
    if turned is not None and hidden % heads:
        width = turned
    head_dim = size("attention.key_length", width)
    config = Config(
        architectures=[architecture.hf_class],
        model_type=architecture.model_type,
        vocab_size=tensors[_EMBEDDING].shape[0],
        hidden_size=hidden,
        intermediate_size=size("feed_forward_length"),
        num_hidden_layers=size("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=size("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=size("context_length"),
        rope_scaling=_rope_scaling(metadata, prefix, architecture),
        tie_word_embeddings="output.weight" not in tensors,
        **{key: metadata.number(f"{prefix}.{n}") for n, key in architecture.numbers.items()},
        **{
            key: value
            for n, key in architecture.maybe_numbers.items()
            if (value := metadata.maybe_number(f"{prefix}.{n}")) is not None
        },
        **{key: tensor in tensors for key, tensor in architecture.present.items()},
        **architecture.config,
    )
    if architecture.slides and (
        slides := metadata.maybe_numbers(f"{prefix}.{architecture.slides}", "b")
    ):
        config["layer_types"] = ["sliding_attention" if s else "full_attention" for s in slides]
    if (theta := metadata.maybe_number(f"{prefix}.rope.freq_base")) is not None:
        config["rope_theta"] = theta
    if turned is not None and turned != head_dim:
        config["partial_rotary_factor"] = turned / head_dim
    _refuse_variants(metadata, prefix, head_dim)
    return config


def _rope_scaling(
    metadata: GgufMetadata, prefix: str, architecture: GgufArchitecture
) -> dict[str, object] | None:
    def number(key: str) -> float | None:
        return metadata.maybe_number(f"{prefix}.rope.{key}")

    kind = metadata.maybe_text(f"{prefix}.rope.scaling.type")
    factor = number("scaling.factor")
    if kind is None:  # older files have only a linear scale
        factor = number("scale_linear") or factor
        kind = "linear"
    original = metadata.maybe_integer(f"{prefix}.rope.scaling.original_context_length")
    if kind == "none" or factor is None or factor in (0.0, 1.0):
        return None
    scaling: dict[str, object] = {"rope_type": kind, "factor": factor}
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    if kind == "yarn":
        scaling["beta_fast"] = number("scaling.yarn_beta_fast") or 32.0
        scaling["beta_slow"] = number("scaling.yarn_beta_slow") or 1.0
        grown = 1 + 0.1 * math.log(max(factor, 1.0))  # llama.cpp multiplies the two
        stored = number("scaling.attn_factor")
        if stored is None or not architecture.stores_whole_attention_factor:
            stored = grown * (stored or 1.0)
        scaling["attention_factor"] = stored
    return scaling


def _refuse_variants(metadata: GgufMetadata, prefix: str, head_dim: int) -> None:
    """Refuse what config.json of the plain family has no key for, rather than decode nonsense."""
    if metadata.maybe_integer(f"{prefix}.expert_count"):
        raise CheckpointError(
            f"{metadata.path} is a mixture of experts, which is not supported for {prefix!r}"
        )
    value = metadata.maybe_integer(f"{prefix}.attention.value_length")
    if value not in (None, head_dim):
        raise CheckpointError(
            f"{metadata.path}: {prefix}.attention.value_length is {value} for heads of {head_dim}; "
            "uneven heads are not supported"
        )


def refuse_unread(metadata: GgufMetadata) -> None:
    """Raises CheckpointError: a key about the model was not asked for and could matter."""
    prefix = metadata.text("general.architecture")
    for key, said in metadata.unread(f"{prefix}.").items():
        if key.removeprefix(f"{prefix}.") not in _INERT and _matters(said):
            raise CheckpointError(
                f"{metadata.path}: metadata key {key!r} is not known for {prefix!r} and could "
                "change what the model computes; this variant is not supported"
            )


def _matters(value: Value) -> bool:
    """Whether a value says that something is there."""
    return bool(value.any()) if isinstance(value, np.ndarray) else bool(value)
