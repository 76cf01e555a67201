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

    @property
    def table_width(self) -> int:
        """Pairs in a rotary table: the attention operator wants a multiple of 8, so that some may
        have an angle of zero."""
        return -(-self.dim // 16) * 8

    def head_order(self, head_dim: int) -> list[int] | None:
        """Which channel of a head stands where, so that channel i of a pair meets i + table_width.

        None where all are in place. Channels that do not turn fill up both halves.
        """
        pairs, width = self.dim // 2, self.table_width
        if pairs == width:
            return None
        rest = list(range(self.dim, head_dim))
        fill = width - pairs
        first = [*range(pairs), *rest[:fill]]
        second = [*range(pairs, self.dim), *rest[fill : 2 * fill]]
        return [*first, *second, *rest[2 * fill :]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What differs between the attention of two layers.

    Attributes:
        rope: how positions enter queries and keys, if they do.
        window_tokens: how many of the latest tokens one sees, itself included; None for all.
    """

    rope: RopeSpec | None
    window_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNames:
    """Checkpoint names of one layer's weights; `{}` stands for the layer number.

    None where a layer has no such weight. `*_norm` is of what a part reads, `*_post_norm` of what
    it adds to the residual stream.
    """

    attention_norm: str | None
    query: str
    key: str
    value: str
    output: str
    mlp_norm: str | None
    gate: str | None
    up: str
    down: str
    query_norm: str | None = None
    key_norm: str | None = None
    attention_post_norm: str | None = None
    mlp_post_norm: str | None = None

    def norms(self) -> list[str]:
        """Those as wide as the residual stream."""
        names = (
            self.attention_norm,
            self.attention_post_norm,
            self.mlp_norm,
            self.mlp_post_norm,
        )
        return [name for name in names if name is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Weights that a checkpoint stores as one, or transposed; `{}` stands for the layer number.

    Attributes:
        name: in the checkpoint.
        parts: names that `LayerNames` has for pieces of it, one after the other along outputs.
        transposed: stored [in, out].
    """

    name: str
    parts: tuple[str, ...]
    transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A decoder with grouped-query attention and an MLP.

    Attributes:
        norm: "rms", or "layer" for LayerNorm with a bias.
        stored: how the checkpoint stores weights, where that is not one tensor each.
        positions: checkpoint name of learned vectors [context, hidden] that embeddings have added.
        wide_head_norms: query and key are normalized across all heads, not each head by itself.
        residual_scale: what a layer's parts are multiplied with before the residual stream has
            them added. `logits_scale` likewise for logits.
        gain_offset: gains of norms are this more than the checkpoint says.
        attention: of each layer.
        attention_scale: what scores are multiplied with.
        attention_softcap, logits_softcap: c where x becomes c * tanh(x / c); None where it stays.
        activation: "silu", "gelu", "gelu_tanh", "relu" or "relu2".
        embedding_scale: what looked-up embeddings are multiplied with.
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
    activation: str
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    embed: str
    final_norm: str
    head: str
    layer: LayerNames
    norm: str = "rms"
    stored: tuple[StoredTensor, ...] = ()
    positions: str | None = None
    wide_head_norms: bool = False
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    gain_offset: float = 0.0
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    embedding_scale: float = 1.0

    @property
    def ropes(self) -> list[RopeSpec]:
        """Each once, in the order of the first layer that has it."""
        found: list[RopeSpec] = []
        for attention in self.attention:
            if attention.rope is not None and attention.rope not in found:
                found.append(attention.rope)
        return found
