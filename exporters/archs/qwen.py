"""Qwen 2, 2.5 and 3: biases on query, key and value (2), or a norm on each of their heads (3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from headrace.exporters.archs.config_keys import get_bool
from headrace.exporters.archs.llama import LAYER, llama_like
from headrace.exporters.archs.spec import DecoderSpec
from headrace.exporters.archs.windows import qwen_windows, with_windows

MODEL_TYPES = ("qwen2", "qwen3")

_LAYER_3 = dataclasses.replace(
    LAYER,
    query_norm="model.layers.{}.self_attn.q_norm",
    key_norm="model.layers.{}.self_attn.k_norm",
)


def spec_from_config(config: Mapping[str, object]) -> DecoderSpec:
    """As `llama.spec_from_config`."""
    if config["model_type"] == "qwen2":
        spec = llama_like(config, architecture="qwen2", qkv_bias=True)
    else:
        bias = get_bool(config, "attention_bias", False)
        spec = llama_like(
            config, architecture="qwen3", qkv_bias=bias, output_bias=bias, layer=_LAYER_3
        )
    return with_windows(spec, qwen_windows(config))
