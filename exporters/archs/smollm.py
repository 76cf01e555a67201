"""SmolLM 3: a llama of which every fourth layer knows no positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from headrace.exporters.archs.config_keys import get_bool, get_int
from headrace.exporters.archs.llama import llama_like
from headrace.exporters.archs.spec import DecoderSpec
from headrace.exporters.archs.windows import (
    sliding_layers,
    window_of_every_layer,
    with_windows,
)
from headrace.runtime.errors import CheckpointError

MODEL_TYPES = ("smollm3",)


def spec_from_config(config: Mapping[str, object]) -> DecoderSpec:
    """As `llama.spec_from_config`."""
    bias = get_bool(config, "attention_bias", False)
    spec = llama_like(
        config,
        architecture="smollm3",
        tied=True,
        rotary_theta=2_000_000.0,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=get_bool(config, "mlp_bias", False),
    )
    turned = _turned_layers(config, spec.num_layers)
    attention = tuple(
        a if turns else dataclasses.replace(a, rope=None)
        for a, turns in zip(spec.attention, turned, strict=True)
    )
    windows = _windows(config, turned)
    return with_windows(dataclasses.replace(spec, attention=attention), windows)


def _turned_layers(config: Mapping[str, object], layers: int) -> list[bool]:
    """For each layer whether positions enter it: `no_rope_layers`, which holds 1 where they do."""
    interval = get_int(config, "no_rope_layer_interval", 4)
    said = config.get("no_rope_layers")
    if said is None:
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(said, list) or len(said) < layers or any(x not in (0, 1) for x in said):
        raise CheckpointError(
            f"config.json: no_rope_layers is not a list of 0 and 1 for {layers} layers"
        )
    return [bool(turns) for turns in said[:layers]]


def _windows(config: Mapping[str, object], turned: list[bool]) -> tuple[int | None, ...]:
    """If `use_sliding_window`, in the layers without positions."""
    windows = window_of_every_layer(config)
    if not get_bool(config, "use_sliding_window", False):
        config.get("layer_types")  # all layers are alike
        return (None,) * len(turned)
    slides = sliding_layers(config, lambda layer: not turned[layer])
    return tuple(w if s else None for w, s in zip(windows, slides, strict=True))
