"""Phi 3, 3.5 and 4: query, key and value stored as one, gate and up too; a part of each head turns,
with factors of its own for long contexts."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.exporters.archs.config_keys import get_float
from headrace.exporters.archs.llama import LAYER, llama_like
from headrace.exporters.archs.spec import DecoderSpec, StoredTensor
from headrace.exporters.archs.windows import window_of_every_layer, with_windows

MODEL_TYPES = ("phi3",)

_STORED = (
    StoredTensor(
        name="model.layers.{}.self_attn.qkv_proj", parts=(LAYER.query, LAYER.key, LAYER.value)
    ),
    StoredTensor(
        name="model.layers.{}.mlp.gate_up_proj",
        parts=("model.layers.{}.mlp.gate_proj", LAYER.up),
    ),
)
_OLD_NAMES = {"su": "longrope", "yarn": "longrope"}


def spec_from_config(config: Mapping[str, object]) -> DecoderSpec:
    """As `llama.spec_from_config`."""
    spec = llama_like(
        config,
        architecture="phi3",
        norm_eps=get_float(config, "rms_norm_eps", 1e-5),
        rope_names=_OLD_NAMES,
        stored=_STORED,
    )
    return with_windows(spec, window_of_every_layer(config))
