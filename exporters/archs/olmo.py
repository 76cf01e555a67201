"""OLMo 2: norms of what is added to the residual stream, none of what is read from it; query and
key are normalized across all heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from headrace.exporters.archs.config_keys import get_bool, get_float
from headrace.exporters.archs.llama import LAYER, llama_like
from headrace.exporters.archs.spec import DecoderSpec

MODEL_TYPES = ("olmo2",)

_LAYER = dataclasses.replace(
    LAYER,
    attention_norm=None,
    attention_post_norm="model.layers.{}.post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="model.layers.{}.post_feedforward_layernorm",
    query_norm="model.layers.{}.self_attn.q_norm",
    key_norm="model.layers.{}.self_attn.k_norm",
)


def spec_from_config(config: Mapping[str, object]) -> DecoderSpec:
    """As `llama.spec_from_config`."""
    bias = get_bool(config, "attention_bias", False)
    return llama_like(
        config,
        architecture="olmo2",
        norm_eps=get_float(config, "rms_norm_eps", 1e-5),
        qkv_bias=bias,
        output_bias=bias,
        wide_head_norms=True,
        layer=_LAYER,
    )
