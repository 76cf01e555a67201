"""What a text encoder looks like, free of any checkpoint's vocabulary."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderLayerNames:
    """Checkpoint names of one layer's weights; `{}` stands for the layer number."""

    query: str
    key: str
    value: str
    output: str
    attention_norm: str
    inner: str
    outer: str
    mlp_norm: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """A post-norm encoder with learned positions: attention in both directions, two-layer MLP.

    Attributes:
        max_tokens: longest text with its special tokens.
        first_position: row of the position table that the first token gets.
        activation: "gelu", "gelu_tanh" or "relu".
        token_type: checkpoint name of the table of segments, `token_types` rows, the first of which
            all tokens get; None where the model has none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_tokens: int
    first_position: int
    norm_eps: float
    activation: str
    word: str
    position: str
    token_type: str | None
    token_types: int
    embedding_norm: str
    layer: EncoderLayerNames
