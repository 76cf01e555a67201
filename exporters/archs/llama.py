"""Llama family: Llama 2 and 3, SmolLM2, TinyLlama and others that say `llama`.

RMSNorm before attention and MLP, rotary positions (half-split layout), grouped-query attention,
SiLU-gated MLP. Other families are described as what they change of this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headrace.exporters.archs.config_keys import (
    get_activation,
    get_bool,
    get_float,
    get_int,
    get_layers,
)
from headrace.exporters.archs.rope_keys import read_rope
from headrace.exporters.archs.spec import AttentionSpec, DecoderSpec, LayerNames

MODEL_TYPES = ("llama",)

LAYER = LayerNames(
    attention_norm="model.layers.{}.input_layernorm",
    query="model.layers.{}.self_attn.q_proj",
    key="model.layers.{}.self_attn.k_proj",
    value="model.layers.{}.self_attn.v_proj",
    output="model.layers.{}.self_attn.o_proj",
    mlp_norm="model.layers.{}.post_attention_layernorm",
    gate="model.layers.{}.mlp.gate_proj",
    up="model.layers.{}.mlp.up_proj",
    down="model.layers.{}.mlp.down_proj",
)


def spec_from_config(config: Mapping[str, object]) -> DecoderSpec:
    """Read config.json keys (Hugging Face names) into a spec.

    Raises:
        CheckpointError: a key is missing, has another type, or asks for what is not built.
    """
    bias = get_bool(config, "attention_bias", False)
    return llama_like(
        config,
        architecture="llama",
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=get_bool(config, "mlp_bias", False),
    )


def llama_like(
    config: Mapping[str, object],
    *,
    architecture: str,
    head_dim: int | None = None,
    tied: bool = False,
    rotary_theta: float = 10000.0,
    rotary_share: float = 1.0,
    rope_names: Mapping[str, str] | None = None,
    **changes: Any,
) -> DecoderSpec:
    """A llama without biases, but for `changes`, which are fields of the spec.

    `head_dim`, `tied`, `rotary_theta` and `rotary_share` (of a head that turns) hold where the
    configuration does not say; `rope_names` are what the family calls types of rotary scaling.
    """
    hidden_size = get_int(config, "hidden_size")
    num_heads = get_int(config, "num_attention_heads")
    num_layers = get_layers(config, "num_hidden_layers")
    head_dim = get_int(config, "head_dim", head_dim or hidden_size // num_heads)
    tied = get_bool(config, "tie_word_embeddings", tied)
    fields: dict[str, Any] = {
        "vocab_size": get_int(config, "vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": get_int(config, "num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "context_tokens": get_int(config, "max_position_embeddings", 2048),
        "norm_eps": get_float(config, "rms_norm_eps", 1e-6),
        "attention_scale": 1 / math.sqrt(head_dim),
        "tied_embeddings": tied,
        "qkv_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "embed": "model.embed_tokens",
        "final_norm": "model.norm",
        "head": "model.embed_tokens" if tied else "lm_head",
        "layer": LAYER,
    } | changes
    if "attention" not in fields:
        rope = read_rope(config, head_dim, theta=rotary_theta, share=rotary_share, names=rope_names)
        fields["attention"] = (AttentionSpec(rope=rope),) * num_layers
    if "intermediate_size" not in fields:
        fields["intermediate_size"] = get_int(config, "intermediate_size")
    if "activation" not in fields:
        fields["activation"] = get_activation(config, "hidden_act")
    return DecoderSpec(architecture=architecture, **fields)
