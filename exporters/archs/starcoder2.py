"""StarCoder 2: LayerNorm, an MLP without gate, biases everywhere, windows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from headrace.exporters.archs.config_keys import get_activation, get_bool, get_float
from headrace.exporters.archs.llama import LAYER, llama_like
from headrace.exporters.archs.spec import DecoderSpec
from headrace.exporters.archs.windows import window_of_every_layer, with_windows

MODEL_TYPES = ("starcoder2",)

_LAYER = dataclasses.replace(
    LAYER,
    gate=None,
    up="model.layers.{}.mlp.c_fc",
    down="model.layers.{}.mlp.c_proj",
)


def spec_from_config(config: Mapping[str, object]) -> DecoderSpec:
    """As `llama.spec_from_config`."""
    bias = get_bool(config, "use_bias", True)
    spec = llama_like(
        config,
        architecture="starcoder2",
        tied=True,
        activation=get_activation(config, "hidden_act", default="gelu_pytorch_tanh"),
        norm="layer",
        norm_eps=get_float(config, "norm_epsilon", 1e-5),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        layer=_LAYER,
    )
    return with_windows(spec, window_of_every_layer(config))
