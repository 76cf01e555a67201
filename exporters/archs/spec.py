"""What a decoder looks like, free of any checkpoint's vocabulary."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding: inverse frequencies are theta^(-2i/dim), scaled as `scaling` says.

    Attributes:
        dim: channels of a head that turn, in pairs (i, i + dim / 2).
        scaling: None or the checkpoint's `rope_scaling` in Hugging Face form.
    """

    theta: float
    dim: int
    scaling: dict[str, object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What differs between the attention of two layers.

    Attributes:
        rope: how positions enter queries and keys.
        window_tokens: how many of the latest tokens one sees, itself included; None for all.
    """

    rope: RopeSpec
    window_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNames:
    """Checkpoint names of one layer's weights; `{}` stands for the layer number.

    None where a layer has no such weight.
    """

    attention_norm: str
    query: str
    key: str
    value: str
    output: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    query_norm: str | None = None
    key_norm: str | None = None

    def norms(self) -> tuple[str, ...]:
        """Those that normalize the residual stream."""
        return (self.attention_norm, self.mlp_norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A decoder with grouped-query attention and an MLP.

    Attributes:
        attention: of each layer.
        attention_scale: what scores are multiplied with.
        qkv_bias, output_bias, mlp_bias: linear layers carry a `.bias` beside their `.weight`.
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
    norm_eps: float
    attention: tuple[AttentionSpec, ...]
    attention_scale: float
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    embed: str
    final_norm: str
    head: str
    layer: LayerNames

    @property
    def ropes(self) -> list[RopeSpec]:
        """Each once, in the order of the first layer that has it."""
        found: list[RopeSpec] = []
        for attention in self.attention:
            if attention.rope not in found:
                found.append(attention.rope)
        return found
