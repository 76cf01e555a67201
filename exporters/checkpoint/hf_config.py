"""config.json as written by many versions of transformers, brought to one form."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

from headrace.exporters.checkpoint.values import Config, MissingEntryError
from headrace.runtime.errors import CheckpointError

CONFIG_FILE = "config.json"

# What transformers assumes where a key is missing: a saved config leaves defaults out.
_DEFAULTS: dict[str, dict[str, object]] = {
    "llama": {
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
    }
}


def normalize_config(raw: dict[str, object], tensors: Container[str], path: Path) -> Config:
    """One form for the keys that changed over time; other keys stay as they are.

    `rope_parameters` (transformers 5) becomes `rope_theta` and `rope_scaling`; keys that are null
    or missing get transformers' defaults; tied embeddings are found where nothing says so.

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
    for key, value in _DEFAULTS.get(model_type, {}).items():
        config.setdefault(key, value)
    _set_rope(config)
    _set_head_shape(config)
    config.setdefault("tie_word_embeddings", "lm_head.weight" not in tensors)
    return config


def _set_rope(config: Config) -> None:
    parameters = config.get("rope_parameters")
    if isinstance(parameters, dict) and not any(isinstance(v, dict) for v in parameters.values()):
        del config["rope_parameters"]
        scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
        config.setdefault("rope_theta", parameters.get("rope_theta"))
        config.setdefault("rope_scaling", scaling)
    if config.get("rope_theta") is None:
        config["rope_theta"] = 10000.0
    scaling_now = config.get("rope_scaling")
    if isinstance(scaling_now, dict):
        kind = scaling_now.get("rope_type", scaling_now.get("type"))
        if kind in (None, "default"):
            config["rope_scaling"] = None
    config.setdefault("rope_scaling", None)


def _set_head_shape(config: Config) -> None:
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if heads is not None:
        config.setdefault("num_key_value_heads", heads)
    if type(heads) is int and type(hidden) is int and heads > 0:
        config.setdefault("head_dim", hidden // heads)
