"""Gemma 1, 2 and 3 (text): gains of 1 + w, scaled embeddings, GELU, a tied head.

2 and 3 normalize what a part adds to the residual stream as well as what it reads, and let most
layers see only a window; 3 normalizes query and key heads and turns windowed layers faster.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from headrace.exporters.archs.config_keys import (
    get_activation,
    get_bool,
    get_float,
    get_int,
    require_value,
)
from headrace.exporters.archs.llama import LAYER, llama_like
from headrace.exporters.archs.rope_keys import read_rope, read_ropes_by_kind
from headrace.exporters.archs.spec import AttentionSpec, DecoderSpec, RopeSpec
from headrace.exporters.archs.windows import sliding_layers

MODEL_TYPES = ("gemma", "gemma2", "gemma3_text")

_LAYER_2 = dataclasses.replace(
    LAYER,
    attention_post_norm="model.layers.{}.post_attention_layernorm",
    mlp_norm="model.layers.{}.pre_feedforward_layernorm",
    mlp_post_norm="model.layers.{}.post_feedforward_layernorm",
)
_LAYER_3 = dataclasses.replace(
    _LAYER_2,
    query_norm="model.layers.{}.self_attn.q_norm",
    key_norm="model.layers.{}.self_attn.k_norm",
)
_LAYERS = {"gemma": LAYER, "gemma2": _LAYER_2, "gemma3_text": _LAYER_3}
_LARGEST = {"gemma2": 46, "gemma3_text": 62}  # layers of the 27B models


def spec_from_config(config: Mapping[str, object]) -> DecoderSpec:
    """As `llama.spec_from_config`."""
    kind = str(config["model_type"])
    bias = get_bool(config, "attention_bias", False)
    require_value(config, "use_bidirectional_attention", False)
    spec = llama_like(
        config,
        architecture=kind.removesuffix("_text"),
        head_dim=256,
        tied=True,
        activation=_activation(config),
        gain_offset=1.0,
        embedding_scale=math.sqrt(get_int(config, "hidden_size")),
        qkv_bias=bias,
        output_bias=bias,
        layer=_LAYERS[kind],
    )
    if kind == "gemma":
        return spec
    return dataclasses.replace(
        spec,
        attention=_attention(config, kind, spec),
        attention_scale=_attention_scale(config, kind, spec),
        attention_softcap=_softcap(config, "attn_logit_softcapping"),
        logits_softcap=_softcap(config, "final_logit_softcapping"),
    )


def _activation(config: Mapping[str, object]) -> str:
    """Old files name plain GELU and mean the approximation that the models were trained with."""
    activation = get_activation(config, "hidden_activation", "hidden_act", default="gelu_new")
    config.get("hidden_act")
    return "gelu_tanh" if activation == "gelu" else activation


def _attention(
    config: Mapping[str, object], kind: str, spec: DecoderSpec
) -> tuple[AttentionSpec, ...]:
    pattern = 2 if kind == "gemma2" else get_int(config, "sliding_window_pattern", 6)
    slides = sliding_layers(config, lambda layer: (layer + 1) % pattern != 0)
    window = get_int(config, "sliding_window", 4096)
    whole, local = spec.attention[0].rope, spec.attention[0].rope
    if kind == "gemma3_text":
        whole, local = _ropes(config, spec.head_dim)
    return tuple(
        AttentionSpec(rope=local, window_tokens=window) if slide else AttentionSpec(rope=whole)
        for slide in slides
    )


def _ropes(config: Mapping[str, object], head_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """Of layers that see everything and of windowed ones."""
    named = read_ropes_by_kind(config, head_dim, whole_theta=1_000_000.0, local_theta=10000.0)
    if named is not None:
        return named
    whole = read_rope(config, head_dim, theta=1_000_000.0)
    local_theta = get_float(config, "rope_local_base_freq", 10000.0)
    return whole, RopeSpec(theta=local_theta, dim=head_dim)


def _attention_scale(config: Mapping[str, object], kind: str, spec: DecoderSpec) -> float:
    """GGUF files leave `query_pre_attn_scalar` out: it is the head's width but in the largest."""
    usual = float(spec.head_dim)
    if spec.num_layers == _LARGEST[kind]:
        usual = spec.hidden_size / spec.num_heads
    return 1 / math.sqrt(get_float(config, "query_pre_attn_scalar", usual))


def _softcap(config: Mapping[str, object], key: str) -> float | None:
    return None if config.get(key) is None else get_float(config, key, 1.0)
