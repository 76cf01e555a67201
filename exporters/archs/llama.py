"""Llama family: Llama 2 and 3, SmolLM2, TinyLlama and others that say `llama`.

RMSNorm before attention and MLP, rotary positions (half-split layout), grouped-query attention,
SiLU-gated MLP.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.exporters.archs.config_keys import (
    get_bool,
    get_float,
    get_int,
    get_scaling,
    require_value,
)
from headrace.exporters.archs.spec import DecoderSpec, LayerNames, RopeSpec

MODEL_TYPES = ("llama",)

_LAYER = LayerNames(
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
    require_value(config, "hidden_act", "silu")
    hidden_size = get_int(config, "hidden_size")
    num_heads = get_int(config, "num_attention_heads")
    tied = get_bool(config, "tie_word_embeddings", False)
    return DecoderSpec(
        architecture="llama",
        vocab_size=get_int(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=get_int(config, "intermediate_size"),
        num_layers=get_int(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=get_int(config, "num_key_value_heads", num_heads),
        head_dim=get_int(config, "head_dim", hidden_size // num_heads),
        context_tokens=get_int(config, "max_position_embeddings", 2048),
        rms_eps=get_float(config, "rms_norm_eps", 1e-6),
        rope=RopeSpec(theta=get_float(config, "rope_theta", 10000.0), scaling=get_scaling(config)),
        tied_embeddings=tied,
        attention_bias=get_bool(config, "attention_bias", False),
        mlp_bias=get_bool(config, "mlp_bias", False),
        embed="model.embed_tokens",
        final_norm="model.norm",
        head="model.embed_tokens" if tied else "lm_head",
        layer=_LAYER,
    )
