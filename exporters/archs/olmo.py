"""OLMo 2 and 3: norms of what is added to the residual stream, none of what is read from it; query
and key are normalized across all heads.

3 lets most layers see only a window; rotary positions are scaled in the others alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from headrace.exporters.archs.config_keys import get_bool, get_float, get_int
from headrace.exporters.archs.llama import LAYER, llama_like
from headrace.exporters.archs.rope_keys import read_rope, read_ropes_by_kind
from headrace.exporters.archs.spec import AttentionSpec, DecoderSpec, RopeSpec
from headrace.exporters.archs.windows import sliding_layers

MODEL_TYPES = ("olmo2", "olmo3")

_LAYER = dataclasses.replace(
    LAYER,
    attention_norm=None,
    attention_post_norm="model.layers.{}.post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="model.layers.{}.post_feedforward_layernorm",
    query_norm="model.layers.{}.self_attn.q_norm",
    key_norm="model.layers.{}.self_attn.k_norm",
)
_THETA_3 = 500_000.0


def spec_from_config(config: Mapping[str, object]) -> DecoderSpec:
    """As `llama.spec_from_config`."""
    kind = str(config["model_type"])
    bias = get_bool(config, "attention_bias", False)
    spec = llama_like(
        config,
        architecture=kind,
        norm_eps=get_float(config, "rms_norm_eps", 1e-5),
        qkv_bias=bias,
        output_bias=bias,
        wide_head_norms=True,
        layer=_LAYER,
    )
    if kind == "olmo2":
        return spec
    return dataclasses.replace(spec, attention=_attention(config, spec.head_dim))


def _attention(config: Mapping[str, object], head_dim: int) -> tuple[AttentionSpec, ...]:
    slides = sliding_layers(config, lambda layer: (layer + 1) % 4 != 0)
    window = get_int(config, "sliding_window", 4096)
    whole, local = _ropes(config, head_dim)
    return tuple(
        AttentionSpec(rope=local, window_tokens=window) if slide else AttentionSpec(rope=whole)
        for slide in slides
    )


def _ropes(config: Mapping[str, object], head_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """Of layers that see everything and of windowed ones."""
    named = read_ropes_by_kind(config, head_dim, whole_theta=_THETA_3, local_theta=_THETA_3)
    if named is not None:
        return named
    whole = read_rope(config, head_dim, theta=_THETA_3)
    return whole, dataclasses.replace(whole, scaling=None)
