"""Mistral: a llama whose layers may all see only a window of the latest tokens."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.exporters.archs.llama import llama_like
from headrace.exporters.archs.spec import DecoderSpec
from headrace.exporters.archs.windows import window_of_every_layer, with_windows

MODEL_TYPES = ("mistral",)


def spec_from_config(config: Mapping[str, object]) -> DecoderSpec:
    """As `llama.spec_from_config`."""
    spec = llama_like(config, architecture="mistral")
    return with_windows(spec, window_of_every_layer(config))
