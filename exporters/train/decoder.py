"""The decoder of `exporters.graph.decoder` in torch: the same parts, whole sequences, no cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from headrace.exporters.graph.decoder import DecoderParts
from headrace.exporters.graph.functions import MIX_WIDTH
from headrace.exporters.graph.linear import LinearFormat, RowInt8Format, Weight
from headrace.exporters.graph.mixing import mixing_matrix
from headrace.exporters.graph.rope import rope_tables
from headrace.exporters.quant.formats import Blocks, Float, RowInt8
from headrace.exporters.train.linear import TrainedLinear, post_training


class TorchDecoder:
    """Logits of whole sequences, rounded as a package would round them.

    The embedding and the head are as they are without training; all else can be trained.

    Args:
        parts: the weights; its formats and its KV cache are ignored.
        choose: the format of each weight, as for `MixedFormat`.
        sequence_tokens: the longest sequence.

    Attributes:
        linears: by name of the weight, stacked ones as in the graph.
        vectors: gains and biases by checkpoint name, float32 [n].
    """

    def __init__(
        self,
        parts: DecoderParts,
        choose: Callable[[str], LinearFormat],
        sequence_tokens: int,
        device: torch.device,
    ) -> None:
        self.spec = spec = parts.spec
        self._parts, self._choose, self.device = parts, choose, device
        self.linears: dict[str, TrainedLinear] = {}
        self.vectors: dict[str, Tensor] = {}
        for layer in range(spec.num_layers):
            self._make_layer(layer)
        self._vector(f"{spec.final_norm}.weight")
        self._mix = self._tensor(mixing_matrix())
        self._make_ends()
        self._ropes = [
            [self._tensor(table) for table in rope_tables(rope, sequence_tokens)]
            for rope in spec.ropes
        ]

    def trained(self) -> dict[str, Tensor]:
        """Everything to train: `vectors`, and `NAME.weight` and `NAME.scales` of `linears`."""
        found = dict(self.vectors)
        for name, linear in self.linears.items():
            found[f"{name}.weight"] = linear.weight
            if linear.scales is not None:
                found[f"{name}.scales"] = linear.scales
        return found

    def fixed(self) -> dict[str, Tensor]:
        """What was chosen before training and decides what it means: `NAME.zeros`."""
        return {
            f"{name}.zeros": linear.zeros
            for name, linear in self.linears.items()
            if linear.zeros is not None
        }

    def outputs_of(self, name: str) -> int:
        """Rows of a checkpoint matrix."""
        return self._parts.weight(name).shape[0]

    def states(self, token_ids: Tensor) -> list[Tensor]:
        """int64 [B, T] -> the residual stream behind each layer, float32 [B, T, hidden]."""
        names, scale = self.spec.layer, self.spec.residual_scale
        x = functional.embedding(token_ids, self._embedding) * self.spec.embedding_scale
        found = []
        for layer in range(self.spec.num_layers):
            x = x + scale * self._attention(layer, self._norm(x, names.attention_norm, layer))
            x = x + scale * self._mlp(layer, self._norm(x, names.mlp_norm, layer))
            found.append(x)
        return found

    def head(self, state: Tensor) -> Tensor:
        """The last of `states` -> logits, float32 [B, T, vocab]."""
        hidden = self._norm(state, self.spec.final_norm)
        if self._head_matrix is not None:
            hidden = hidden @ self._head_matrix
        hidden = hidden * self.spec.logits_scale
        return functional.linear(self._head_input.apply(hidden, self._mix), self._head)

    def logits(self, token_ids: Tensor) -> Tensor:
        """int64 [B, T] -> float32 [B, T, vocab]."""
        return self.head(self.states(token_ids)[-1])

    def _attention(self, layer: int, x: Tensor) -> Tensor:
        spec, names = self.spec, self.spec.layer
        sizes = [n * spec.head_dim for n in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
        query, key, value = (
            part.unflatten(-1, (-1, spec.head_dim)).transpose(1, 2)
            for part in self.linears[self._stacked_qkv(layer)](x).split(sizes, -1)
        )
        if names.query_norm is not None and names.key_norm is not None:
            query = self._norm(query, names.query_norm, layer)
            key = self._norm(key, names.key_norm, layer)
        attention = spec.attention[layer]
        assert attention.rope is not None, "see unknown_parts"
        cos, sin = self._ropes[spec.ropes.index(attention.rope)]
        mask = _window_mask(x.shape[1], attention.window_tokens, x.device)
        attended = functional.scaled_dot_product_attention(
            _rotary(query, cos, sin),
            _rotary(key, cos, sin),
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=spec.attention_scale,
            enable_gqa=True,
        )
        joined = attended.transpose(1, 2).flatten(-2)
        return self.linears[names.output.format(layer)](joined)

    def _mlp(self, layer: int, x: Tensor) -> Tensor:
        gate, up = self.linears[self._stacked_mlp(layer)](x).chunk(2, -1)
        return self.linears[self.spec.layer.down.format(layer)](functional.silu(gate) * up)

    def _norm(self, x: Tensor, name: str | None, layer: int | None = None) -> Tensor:
        assert name is not None, "see unknown_parts"
        gain = self.vectors[f"{name if layer is None else name.format(layer)}.weight"]
        return functional.rms_norm(x, (x.shape[-1],), gain, self.spec.norm_eps)

    def _stacked_qkv(self, layer: int) -> str:
        names = self.spec.layer
        return "+".join(n.format(layer) for n in (names.query, names.key, names.value))

    def _stacked_mlp(self, layer: int) -> str:
        names = self.spec.layer
        return "+".join(n.format(layer) for n in (names.gate, names.up) if n is not None)

    def _make_layer(self, layer: int) -> None:
        spec, names = self.spec, self.spec.layer
        for norm in (*names.norms(), names.query_norm, names.key_norm):
            if norm is not None:
                self._vector(f"{norm.format(layer)}.weight")
        self._linear(self._stacked_qkv(layer), spec.qkv_bias)
        self._linear(names.output.format(layer), spec.output_bias)
        self._linear(self._stacked_mlp(layer), spec.mlp_bias)
        down = names.down.format(layer)
        row = isinstance(self._choose(down), RowInt8Format)
        mixed = row and spec.intermediate_size % MIX_WIDTH == 0  # as MixedFormat does
        self._linear(down, spec.mlp_bias, mixed=mixed)

    def _make_ends(self) -> None:
        """The embedding and the head."""
        spec, parts = self.spec, self._parts
        embedding = parts.weight(spec.embed)
        self._head_input, stored = post_training(
            self._choose(spec.embed), embedding, embedding=True
        )
        self._embedding = self._head = self._values(embedding, stored)
        if not spec.tied_embeddings:
            head = parts.weight(spec.head)
            self._head_input, stored = post_training(self._choose(spec.head), head)
            self._head = self._values(head, stored)
        matrix = parts.head_matrix
        self._head_matrix = None if matrix is None else self._tensor(matrix())

    def _linear(self, name: str, has_bias: bool, *, mixed: bool = False) -> None:
        parts = name.split("+")
        biases = [self._vector(f"{part}.bias") for part in parts] if has_bias else []
        self.linears[name] = TrainedLinear(
            self._parts.weight(*parts), self._choose(name), self.device, biases, mixed=mixed
        )

    def _vector(self, name: str) -> Tensor:
        self.vectors[name] = self._tensor(self._parts.vector(name))
        return self.vectors[name]

    def _values(self, weight: Weight, stored: RowInt8 | Blocks | None) -> Tensor:
        return self._tensor(weight.load() if stored is None else stored.dequantize())

    def _tensor(self, values: Float) -> Tensor:
        return torch.from_numpy(values.copy()).to(self.device)


def _rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[B, heads, T, head_dim] with pairs (i, i + dim / 2) turned; cos, sin [positions, dim / 2]."""
    tokens, half = x.shape[-2], cos.shape[-1]
    cos, sin = cos[:tokens], sin[:tokens]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], -1)


def _window_mask(tokens: int, window_tokens: int | None, device: torch.device) -> Tensor | None:
    """bool [T, T]: what each token sees; None if all before it."""
    if window_tokens is None:
        return None
    place = torch.arange(tokens, device=device)
    back = place[:, None] - place[None, :]
    return (back >= 0) & (back < window_tokens)
