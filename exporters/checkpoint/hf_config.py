"""config.json as written by many versions of transformers, brought to one form."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import TypeVar

from headrace.exporters.checkpoint.values import Config, MissingEntryError
from headrace.runtime.errors import CheckpointError

T = TypeVar("T")

CONFIG_FILE = "config.json"

# Keys of families that have their own names for what all have.
_RENAMED = {
    "gpt2": {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "n_inner": "intermediate_size",
    }
}


# What comes before the names of a model with a head, by the embedding's name without it.
_PREFIXES = {"embed_tokens.weight": "model.", "wte.weight": "transformer."}


def full_names(tensors: Mapping[str, T]) -> dict[str, T]:
    """Names as a model with a head has them: some checkpoints were saved from the model without."""
    prefix = next((p for name, p in _PREFIXES.items() if name in tensors), "")
    return {prefix + name: tensor for name, tensor in tensors.items()}


def normalize_config(raw: dict[str, object], tensors: Container[str], path: Path) -> Config:
    """One form for the keys that changed over time; other keys stay as they are.

    `rope_parameters` (transformers 5) becomes `rope_theta` and `rope_scaling`; keys that are null
    are left out; tied embeddings are found where nothing says so.

    Raises:
        CheckpointError: no `model_type`, or the weights are quantized for another library.
    """
    config = Config({key: value for key, value in raw.items() if value is not None})
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise MissingEntryError(f"{path} has no 'model_type'; it is not a model's configuration")
    if "quantization_config" in config:
        quantization = config["quantization_config"]
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise CheckpointError(
            f"{path} says that the weights are already quantized ({method!r}); "
            "export the original checkpoint instead"
        )
    for old, new in _RENAMED.get(model_type, {}).items():
        if old in config:
            config[new] = config.pop(old)
    _set_rope(config)
    config.setdefault("tie_word_embeddings", "lm_head.weight" not in tensors)
    return config


def _set_rope(config: Config) -> None:
    parameters = config.get("rope_parameters")
    if isinstance(parameters, dict) and not any(isinstance(v, dict) for v in parameters.values()):
        del config["rope_parameters"]
        moved = ("rope_theta", "partial_rotary_factor")
        for key in moved:
            if parameters.get(key) is not None:
                config.setdefault(key, parameters[key])
        config.setdefault("rope_scaling", {k: v for k, v in parameters.items() if k not in moved})
