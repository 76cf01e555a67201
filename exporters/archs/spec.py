"""What a decoder looks like, free of any checkpoint's vocabulary."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding: inverse frequencies are theta^(-2i/dim), scaled as `scaling` says.

    `scaling` is None or the checkpoint's `rope_scaling` in Hugging Face form.
    """

    theta: float
    scaling: dict[str, object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNames:
    """Checkpoint names of one layer's weights; `{}` stands for the layer number."""

    attention_norm: str
    query: str
    key: str
    value: str
    output: str
    mlp_norm: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A pre-norm decoder with gated MLP and grouped-query attention.

    Attributes:
        attention_bias, mlp_bias: linear layers carry a `.bias` beside their `.weight`.
        embed, final_norm, head: checkpoint names; with tied embeddings `head` is `embed`.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_tokens: int
    rms_eps: float
    rope: RopeSpec
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    embed: str
    final_norm: str
    head: str
    layer: LayerNames
