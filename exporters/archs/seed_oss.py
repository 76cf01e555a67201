"""Seed-OSS: a llama with biases on query, key and value, and heads of a width of their own."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.exporters.archs.config_keys import get_bool
from headrace.exporters.archs.llama import llama_like
from headrace.exporters.archs.spec import DecoderSpec

MODEL_TYPES = ("seed_oss",)


def spec_from_config(config: Mapping[str, object]) -> DecoderSpec:
    """As `llama.spec_from_config`."""
    return llama_like(
        config,
        architecture="seed_oss",
        head_dim=128,
        qkv_bias=get_bool(config, "attention_bias", True),
        output_bias=get_bool(config, "attention_out_bias", False),
        mlp_bias=get_bool(config, "mlp_bias", False),
    )
