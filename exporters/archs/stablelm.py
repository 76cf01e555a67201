"""StableLM: LayerNorm with biases, and only a quarter of each head turns."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.exporters.archs.config_keys import get_bool, get_float, require_value
from headrace.exporters.archs.llama import llama_like
from headrace.exporters.archs.spec import DecoderSpec

MODEL_TYPES = ("stablelm",)


def spec_from_config(config: Mapping[str, object]) -> DecoderSpec:
    """As `llama.spec_from_config`."""
    require_value(config, "qk_layernorm", False)
    require_value(config, "use_parallel_residual", False)
    return llama_like(
        config,
        architecture="stablelm",
        norm="layer",
        norm_eps=get_float(config, "layer_norm_eps", 1e-5),
        qkv_bias=get_bool(config, "use_qkv_bias", False),
        rotary_share=0.25,
    )
