"""Rotary settings of a configuration: `rope_theta`, `partial_rotary_factor`, `rope_scaling`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from headrace.exporters.archs.config_keys import get_float, get_int
from headrace.exporters.archs.spec import RopeSpec
from headrace.runtime.errors import CheckpointError

# Types of `rope_scaling` with the keys that each reads; all may carry those of `_INERT`.
KNOWN_KEYS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        "truncate",
    ),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor"),
    "frequency_factors": ("factors",),
}
_INERT = ("rope_type", "type", "original_max_position_embeddings", "finetuned")
# They compare with the context that the model was trained on first, and default to the context.
_NEED_ORIGINAL = ("llama3", "yarn", "longrope")


def read_rope(
    config: Mapping[str, object],
    head_dim: int,
    *,
    theta: float = 10000.0,
    share: float = 1.0,
    names: Mapping[str, str] | None = None,
) -> RopeSpec:
    """Rotary embedding of a flat configuration.

    `theta` and `share` (of a head that turns) hold where the configuration does not say; `names`
    are what a family calls types of scaling.

    Raises:
        CheckpointError: `rope_scaling` is of an unknown type or has an unknown key.
    """
    return RopeSpec(
        theta=get_float(config, "rope_theta", theta),
        # 32 of 80 channels come as 0.4, which may make 31.999...
        dim=int(head_dim * get_float(config, "partial_rotary_factor", share) + 1e-6),
        scaling=read_scaling(config, config.get("rope_scaling"), names or {}),
    )


def read_ropes_by_kind(
    config: Mapping[str, object], head_dim: int, *, whole_theta: float, local_theta: float
) -> tuple[RopeSpec, RopeSpec] | None:
    """Of layers that see everything and of windowed ones; None where all share one setting.

    The thetas hold where `rope_parameters` does not say.

    Raises:
        CheckpointError: as `read_rope`, or `rope_parameters` is none by kind of layer.
    """
    nested = config.get("rope_parameters")
    if nested is None:
        return None
    if not isinstance(nested, dict) or not all(isinstance(v, dict) for v in nested.values()):
        raise CheckpointError(f"config.json: rope_parameters={nested!r} is not supported here")
    found = []
    for kind, theta in (("full_attention", whole_theta), ("sliding_attention", local_theta)):
        said = dict(nested.get(kind, {}))
        base = get_float(said, "rope_theta", theta)
        said.pop("rope_theta", None)
        found.append(RopeSpec(theta=base, dim=head_dim, scaling=read_scaling(config, said, {})))
    return found[0], found[1]


def read_scaling(
    config: Mapping[str, object], value: object, names: Mapping[str, str]
) -> dict[str, object] | None:
    """A `rope_scaling` with its defaults filled in; None where it scales nothing."""
    original = get_int(config, "original_max_position_embeddings", 0)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise CheckpointError(f"config.json: rope_scaling={value!r} is not an object")
    scaling = {
        key: said for key, said in cast(dict[str, object], value).items() if said is not None
    }
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in (None, "default"):
        return None
    if isinstance(kind, str) and kind in names:
        scaling["rope_type"] = kind = names[kind]
    if not isinstance(kind, str) or kind not in KNOWN_KEYS:
        raise CheckpointError(
            f"rope_scaling type {kind!r} is not supported; known: {', '.join(KNOWN_KEYS)}"
        )
    for key in scaling:
        if key not in KNOWN_KEYS[kind] and key not in _INERT:
            raise CheckpointError(f"rope_scaling: {key}={scaling[key]!r} is not known for {kind!r}")
    if kind in _NEED_ORIGINAL:
        context = get_int(config, "max_position_embeddings", 2048)
        if original:
            scaling["original_max_position_embeddings"] = original
        trained = scaling.setdefault("original_max_position_embeddings", context)
        if kind != "llama3" and isinstance(trained, int) and trained > 0:
            scaling.setdefault("factor", context / trained)
    return scaling
