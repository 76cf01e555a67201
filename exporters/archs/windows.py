"""Which layers see only a window of the latest tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from headrace.exporters.archs.config_keys import get_bool, get_int, get_layers
from headrace.exporters.archs.spec import DecoderSpec
from headrace.runtime.errors import CheckpointError

_KINDS = {"full_attention": False, "sliding_attention": True}


def with_windows(spec: DecoderSpec, windows: Sequence[int | None]) -> DecoderSpec:
    """The same decoder with these windows, one a layer."""
    attention = tuple(
        dataclasses.replace(a, window_tokens=w)
        for a, w in zip(spec.attention, windows, strict=True)
    )
    return dataclasses.replace(spec, attention=attention)


def window_of_every_layer(config: Mapping[str, object]) -> tuple[int | None, ...]:
    """`sliding_window`, where it is set."""
    window = None if config.get("sliding_window") is None else get_int(config, "sliding_window")
    return (window,) * get_layers(config, "num_hidden_layers")


def qwen_windows(config: Mapping[str, object]) -> tuple[int | None, ...]:
    """A window in the layers from `max_window_layers` on, if `use_sliding_window`."""
    windows = window_of_every_layer(config)
    first = config.get("max_window_layers", 28)
    if not get_bool(config, "use_sliding_window", False):
        config.get("layer_types")  # all layers are alike
        return (None,) * len(windows)
    if isinstance(first, bool) or not isinstance(first, int):
        raise CheckpointError(f"config.json: max_window_layers={first!r} is not an integer")
    slides = sliding_layers(config, lambda layer: layer >= first)
    return tuple(w if s else None for w, s in zip(windows, slides, strict=True))


def sliding_layers(config: Mapping[str, object], usual: Callable[[int], bool]) -> tuple[bool, ...]:
    """For each layer whether it slides: `layer_types`, or `usual` where that is missing."""
    layers = get_layers(config, "num_hidden_layers")
    types = config.get("layer_types")
    if types is None:
        return tuple(usual(layer) for layer in range(layers))
    if not isinstance(types, list) or len(types) != layers:
        raise CheckpointError(
            f"config.json: layer_types does not name the kinds of {layers} layers"
        )
    for kind in types:
        if not isinstance(kind, str) or kind not in _KINDS:
            raise CheckpointError(
                f"config.json: layer_types holds {kind!r}; known kinds: {', '.join(_KINDS)}"
            )
    return tuple(_KINDS[kind] for kind in types)
