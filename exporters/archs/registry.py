"""From a checkpoint's `model_type` to the file that knows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headrace.exporters.archs import (
    arcee,
    gemma,
    gpt2,
    granite,
    llama,
    mistral,
    olmo,
    phi3,
    qwen,
    seed_oss,
    smollm,
    stablelm,
    starcoder2,
)
from headrace.exporters.archs.bert import is_encoder
from headrace.exporters.archs.config_keys import ReadKeys
from headrace.exporters.archs.spec import DecoderSpec
from headrace.runtime.errors import CheckpointError, UnsupportedArchitectureError

# Rotary tables are as long as the context: beyond this a value is a mistake, not a model.
_MAX_CONTEXT_TOKENS = 1 << 24

_MODULES = (
    arcee,
    gemma,
    gpt2,
    granite,
    llama,
    mistral,
    olmo,
    phi3,
    qwen,
    seed_oss,
    smollm,
    stablelm,
    starcoder2,
)
_BY_MODEL_TYPE: dict[str, Callable[[Mapping[str, object]], DecoderSpec]] = {
    model_type: module.spec_from_config for module in _MODULES for model_type in module.MODEL_TYPES
}


def decoder_spec(config: Mapping[str, object]) -> DecoderSpec:
    """Spec of a checkpoint.

    Raises:
        UnsupportedArchitectureError: nothing here knows its `model_type`.
        CheckpointError: its config cannot be used.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError("config.json has no 'model_type'")
    if is_encoder(config):
        raise CheckpointError(
            f"{model_type!r} is an encoder: runtime-export takes it, and so does "
            "headrace.exporters.encoder_package.export_encoder"
        )
    if model_type not in _BY_MODEL_TYPE:
        raise UnsupportedArchitectureError(model_type, _BY_MODEL_TYPE)
    keys = ReadKeys(config)
    spec = _BY_MODEL_TYPE[model_type](keys)
    keys.refuse_unread(model_type)
    if spec.num_heads % spec.num_kv_heads:
        raise CheckpointError(
            f"config.json: {spec.num_heads} attention heads cannot share "
            f"{spec.num_kv_heads} key-value heads"
        )
    multiple = 16 if spec.ropes else 8
    if spec.head_dim % multiple:
        raise CheckpointError(
            f"config.json: head_dim={spec.head_dim} is not a multiple of {multiple}, which the "
            "attention operator asks for"
        )
    for rope in spec.ropes:
        if rope.dim % 2 or not 0 < 2 * rope.table_width <= spec.head_dim:
            raise CheckpointError(
                f"config.json: partial_rotary_factor turns {rope.dim} of {spec.head_dim} "
                "channels of a head, which the attention operator cannot"
            )
    if spec.context_tokens > _MAX_CONTEXT_TOKENS:
        raise CheckpointError(
            f"config.json: max_position_embeddings={spec.context_tokens} is more than "
            f"{_MAX_CONTEXT_TOKENS}; correct it"
        )
    return spec
