"""Typed access to a checkpoint's config.json.

A key that nobody reads may change the computation, so it is refused by name, unless it is known to
be about something else or has the value of a thing that is absent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from headrace.runtime.errors import CheckpointError

_MAX_SIZE = 2**31 - 1
_MAX_LAYERS = 4096
_MAX_NUMBER = 1e30

# About training, tools, tokens, or how the model class is called.
_INERT = frozenset(
    {
        "architectures",
        "auto_map",
        "cache_implementation",
        "chunk_size_feed_forward",
        "dtype",
        "gradient_checkpointing",
        "id2label",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "license",
        "model_max_length",
        "model_name",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pretraining_tp",  # splits products, for reproducibility
        "problem_type",
        "quantization",
        "return_dict",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "unsloth_fixed",
        "use_cache",
        "vocab_size",
    }
)
_INERT_ENDINGS = ("_token_id", "_pdrop", "_dropout", "dropout", "_version", "_init", "_init_std")
_INERT_BEGINNINGS = ("_", "initializer_", "router_aux", "summary_", "task_specific_")


_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


class ReadKeys(Mapping[str, object]):
    """A configuration that remembers which of its keys were asked for."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self._config = config
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> object:
        self._read.add(key)
        return self._config[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    def __len__(self) -> int:
        return len(self._config)

    def refuse_unread(self, architecture: str) -> None:
        """Raises CheckpointError: a key was not asked for and could matter."""
        for key, value in self._config.items():
            if key not in self._read and not _is_inert(key) and value not in _NEUTRAL:
                raise CheckpointError(
                    f"config.json: {key}={_short(value)} is not known for {architecture!r} and "
                    "could change what the model computes; remove it if it does not"
                )


_NEUTRAL: tuple[object, ...] = (None, False, "", [], {})  # 0 and 0.0 equal False


def _is_inert(key: str) -> bool:
    return key in _INERT or key.startswith(_INERT_BEGINNINGS) or key.endswith(_INERT_ENDINGS)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."


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


def get_layers(config: Mapping[str, object], key: str) -> int:
    """A count of layers."""
    layers = get_int(config, key)
    if layers > _MAX_LAYERS:
        raise CheckpointError(f"config.json: {key}={layers} is more than {_MAX_LAYERS}; correct it")
    return layers


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


def get_activation(config: Mapping[str, object], *keys: str, default: str = "silu") -> str:
    """As `DecoderSpec.activation`, from the first of the keys that is there."""
    said = next((config[key] for key in keys if config.get(key) is not None), default)
    if not isinstance(said, str) or said not in _ACTIVATIONS:
        raise CheckpointError(
            f"config.json: {keys[0]}={said!r} is not supported; known: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[said]


def require_value(config: Mapping[str, object], key: str, *expected: object) -> None:
    """The key is missing or has a value that this architecture's graph is built for."""
    value = config.get(key)
    if value is not None and value not in expected:
        allowed = " or ".join(map(repr, expected))
        raise CheckpointError(
            f"config.json: {key}={value!r} is not supported here; only {allowed} is"
        )
