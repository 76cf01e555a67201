"""BERT family: BERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT.

They differ in their names, in the position of the first token, and in whether there are segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from headrace.exporters.archs.config_keys import (
    ReadKeys,
    get_bool,
    get_float,
    get_int,
    get_layers,
    require_value,
)
from headrace.exporters.archs.encoder_spec import EncoderLayerNames, EncoderSpec
from headrace.runtime.errors import CheckpointError, UnsupportedArchitectureError

# What Hugging Face calls them; its other activations have no fused kernel here.
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
# Keys about training, about heads that are not built, or about rotary positions, which there are
# none of: `normalize_config` gives every configuration those.
_INERT = (
    "attention_probs_dropout_prob",
    "hidden_dropout_prob",
    "directionality",
    "export_model_type",
    "finetuning_task",
    "num_labels",
    "output_past",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
    "rope_scaling",
    "rope_theta",
    "sinusoidal_pos_embds",
    "tie_weights_",
    "tie_word_embeddings",
)
_FIRST_TENSOR = "embeddings.word_embeddings.weight"
_BERT_LAYER = EncoderLayerNames(
    query="encoder.layer.{}.attention.self.query",
    key="encoder.layer.{}.attention.self.key",
    value="encoder.layer.{}.attention.self.value",
    output="encoder.layer.{}.attention.output.dense",
    attention_norm="encoder.layer.{}.attention.output.LayerNorm",
    inner="encoder.layer.{}.intermediate.dense",
    outer="encoder.layer.{}.output.dense",
    mlp_norm="encoder.layer.{}.output.LayerNorm",
)
_DISTILBERT_LAYER = EncoderLayerNames(
    query="transformer.layer.{}.attention.q_lin",
    key="transformer.layer.{}.attention.k_lin",
    value="transformer.layer.{}.attention.v_lin",
    output="transformer.layer.{}.attention.out_lin",
    attention_norm="transformer.layer.{}.sa_layer_norm",
    inner="transformer.layer.{}.ffn.lin1",
    outer="transformer.layer.{}.ffn.lin2",
    mlp_norm="transformer.layer.{}.output_layer_norm",
)


def is_encoder(config: Mapping[str, object]) -> bool:
    """Whether config.json describes a text encoder that is known here."""
    return config.get("model_type") in _BY_MODEL_TYPE


def encoder_spec(config: Mapping[str, object], tensors: Iterable[str]) -> EncoderSpec:
    """Read config.json keys into a spec.

    Args:
        tensors: names of the checkpoint's tensors: a model with a head on top has its encoder's
            under a prefix.

    Raises:
        UnsupportedArchitectureError: nothing here knows its `model_type`.
        CheckpointError: a key is missing, has another type, or asks for what is not built.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _BY_MODEL_TYPE:
        raise UnsupportedArchitectureError(str(model_type), _BY_MODEL_TYPE)
    if get_bool(config, "is_decoder", False):
        raise CheckpointError("config.json: is_decoder=true; an encoder looks in both directions")
    keys = ReadKeys(config)
    spec = _BY_MODEL_TYPE[model_type](keys, tensors)
    for key in _INERT:
        keys.get(key)
    keys.refuse_unread(model_type)
    if spec.hidden_size % spec.num_heads:
        raise CheckpointError(
            f"config.json: hidden_size={spec.hidden_size} cannot be shared by "
            f"{spec.num_heads} attention heads"
        )
    if spec.max_tokens < 3:
        raise CheckpointError(
            f"config.json: its position table has room for {spec.max_tokens} tokens; correct it"
        )
    return spec


def _bert(config: Mapping[str, object], tensors: Iterable[str], *, offset: bool) -> EncoderSpec:
    """`offset`: positions start behind the padding token, as in RoBERTa."""
    require_value(config, "position_embedding_type", "absolute")
    first = _padding_id(config) + 1 if offset else 0
    before = _prefix(tensors)
    return EncoderSpec(
        architecture=str(config["model_type"]),
        vocab_size=get_int(config, "vocab_size"),
        hidden_size=get_int(config, "hidden_size"),
        intermediate_size=get_int(config, "intermediate_size"),
        num_layers=get_layers(config, "num_hidden_layers"),
        num_heads=get_int(config, "num_attention_heads"),
        max_tokens=get_int(config, "max_position_embeddings", 512) - first,
        first_position=first,
        norm_eps=get_float(config, "layer_norm_eps", 1e-12),
        activation=_activation(config, "hidden_act"),
        word=f"{before}embeddings.word_embeddings",
        position=f"{before}embeddings.position_embeddings",
        token_type=f"{before}embeddings.token_type_embeddings",
        token_types=get_int(config, "type_vocab_size", 2),
        embedding_norm=f"{before}embeddings.LayerNorm",
        layer=_with_prefix(_BERT_LAYER, before),
    )


def _distilbert(config: Mapping[str, object], tensors: Iterable[str]) -> EncoderSpec:
    before = _prefix(tensors)
    return EncoderSpec(
        architecture="distilbert",
        vocab_size=get_int(config, "vocab_size"),
        hidden_size=get_int(config, "dim"),
        intermediate_size=get_int(config, "hidden_dim"),
        num_layers=get_layers(config, "n_layers"),
        num_heads=get_int(config, "n_heads"),
        max_tokens=get_int(config, "max_position_embeddings", 512),
        first_position=0,
        norm_eps=1e-12,
        activation=_activation(config, "activation"),
        word=f"{before}embeddings.word_embeddings",
        position=f"{before}embeddings.position_embeddings",
        token_type=None,
        token_types=0,
        embedding_norm=f"{before}embeddings.LayerNorm",
        layer=_with_prefix(_DISTILBERT_LAYER, before),
    )


def _padding_id(config: Mapping[str, object]) -> int:
    value = config.get("pad_token_id", 1)
    if type(value) is not int or value < 0:
        raise CheckpointError(f"config.json: pad_token_id={value!r} is not a token id")
    return value


def _activation(config: Mapping[str, object], key: str) -> str:
    name = config.get(key, "gelu")
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise CheckpointError(
            f"config.json: {key}={name!r} is not supported; known are {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _prefix(tensors: Iterable[str]) -> str:
    """What a model with a head, or a wrapper, puts before its encoder's names."""
    found = (name for name in tensors if name.endswith(_FIRST_TENSOR))
    return next(found, _FIRST_TENSOR).removesuffix(_FIRST_TENSOR)


def _with_prefix(names: EncoderLayerNames, prefix: str) -> EncoderLayerNames:
    return EncoderLayerNames(
        query=prefix + names.query,
        key=prefix + names.key,
        value=prefix + names.value,
        output=prefix + names.output,
        attention_norm=prefix + names.attention_norm,
        inner=prefix + names.inner,
        outer=prefix + names.outer,
        mlp_norm=prefix + names.mlp_norm,
    )


_roberta = partial(_bert, offset=True)
_BY_MODEL_TYPE: dict[str, Callable[[Mapping[str, object], Iterable[str]], EncoderSpec]] = {
    "bert": partial(_bert, offset=False),
    "roberta": _roberta,
    "xlm-roberta": _roberta,
    "camembert": _roberta,
    "distilbert": _distilbert,
}
