"""GPT-2 and GPT-3's shape: learned positions, LayerNorm, GELU without a gate, biases everywhere.

Weights are stored [in, out], with query, key and value as one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from headrace.exporters.archs.config_keys import (
    get_activation,
    get_float,
    get_int,
    get_layers,
    require_value,
)
from headrace.exporters.archs.llama import llama_like
from headrace.exporters.archs.spec import AttentionSpec, DecoderSpec, LayerNames, StoredTensor

MODEL_TYPES = ("gpt2",)

_LAYER = LayerNames(
    attention_norm="transformer.h.{}.ln_1",
    query="transformer.h.{}.attn.c_attn.query",
    key="transformer.h.{}.attn.c_attn.key",
    value="transformer.h.{}.attn.c_attn.value",
    output="transformer.h.{}.attn.c_proj",
    mlp_norm="transformer.h.{}.ln_2",
    gate=None,
    up="transformer.h.{}.mlp.c_fc",
    down="transformer.h.{}.mlp.c_proj",
)
_STORED = (
    StoredTensor(
        name="transformer.h.{}.attn.c_attn",
        parts=(_LAYER.query, _LAYER.key, _LAYER.value),
        transposed=True,
    ),
    *(
        StoredTensor(name=name, parts=(name,), transposed=True)
        for name in (_LAYER.output, _LAYER.up, _LAYER.down)
    ),
)


def spec_from_config(config: Mapping[str, object]) -> DecoderSpec:
    """As `llama.spec_from_config`, with the names of keys that other families have."""
    require_value(config, "scale_attn_weights", True)
    require_value(config, "scale_attn_by_inverse_layer_idx", False)
    config.get("reorder_and_upcast_attn")  # order and width of sums
    config.get("n_ctx")  # what max_position_embeddings says
    hidden = get_int(config, "hidden_size")
    layers = get_layers(config, "num_hidden_layers")
    spec = llama_like(
        config,
        architecture="gpt2",
        tied=True,
        intermediate_size=get_int(config, "intermediate_size", 4 * hidden),
        activation=get_activation(config, "activation_function", default="gelu_new"),
        attention=(AttentionSpec(rope=None),) * layers,
        norm="layer",
        norm_eps=get_float(config, "layer_norm_epsilon", 1e-5),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        embed="transformer.wte",
        positions="transformer.wpe",
        final_norm="transformer.ln_f",
        layer=_LAYER,
        stored=_STORED,
    )
    return dataclasses.replace(spec, head="transformer.wte" if spec.tied_embeddings else "lm_head")
