"""Granite: a llama with four multipliers."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.exporters.archs.config_keys import get_bool, get_float
from headrace.exporters.archs.llama import llama_like
from headrace.exporters.archs.spec import DecoderSpec

MODEL_TYPES = ("granite",)


def spec_from_config(config: Mapping[str, object]) -> DecoderSpec:
    """As `llama.spec_from_config`."""
    bias = get_bool(config, "attention_bias", False)
    return llama_like(
        config,
        architecture="granite",
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=get_bool(config, "mlp_bias", False),
        attention_scale=get_float(config, "attention_multiplier", 1.0),
        embedding_scale=get_float(config, "embedding_multiplier", 1.0),
        residual_scale=get_float(config, "residual_multiplier", 1.0),
        logits_scale=1 / get_float(config, "logits_scaling", 1.0),
    )
