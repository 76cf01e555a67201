"""Arcee: a llama whose MLP has no gate and squares what ReLU leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from headrace.exporters.archs.config_keys import get_activation, get_bool, get_float
from headrace.exporters.archs.llama import LAYER, llama_like
from headrace.exporters.archs.spec import DecoderSpec

MODEL_TYPES = ("arcee",)


def spec_from_config(config: Mapping[str, object]) -> DecoderSpec:
    """As `llama.spec_from_config`."""
    bias = get_bool(config, "attention_bias", False)
    return llama_like(
        config,
        architecture="arcee",
        activation=get_activation(config, "hidden_act", default="relu2"),
        norm_eps=get_float(config, "rms_norm_eps", 1e-5),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=get_bool(config, "mlp_bias", False),
        layer=dataclasses.replace(LAYER, gate=None),
    )
