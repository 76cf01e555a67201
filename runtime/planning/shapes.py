"""Sizes of models, and how many bytes a rank of a tensor-parallel group holds of one.

Columns of query, key, value, gate and up, and rows of output and down are split between ranks; so
is the vocabulary. Heads go by whole KV groups, unevenly where they do not divide; with more ranks
than KV heads those are repeated. Norms and what is added after a sum over ranks is on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.runtime.errors import ConfigError
from headrace.runtime.manifest import ModelInfo


@dataclass(frozen=True, slots=True)
class Matrix:
    """`columns` are contracted; quantized blocks run along them."""

    rows: int
    columns: int

    @property
    def elements(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder.

    Attributes:
        name: as people type it.
        gated: the MLP has a gate beside up and down.
        tied: embedding and head are one matrix.
        norms: vectors of the hidden size in a layer.
        head_norms: norms of query and key heads.
        qkv_bias: query, key and value have biases.
        biased: all products and norms have biases (GPT).
        learned_positions: rows of the table of positions.
        source: where these figures are from.
    """

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context_tokens: int
    tied: bool
    source: str
    gated: bool = True
    norms: int = 2
    head_norms: bool = False
    qkv_bias: bool = False
    biased: bool = False
    learned_positions: int = 0

    @property
    def parameters(self) -> int:
        """All of them, tied ones once."""
        whole = Share(self, 0, 1)
        return sum(m.elements for m in whole.matrices()) + whole.vector_elements()

    def kv_bytes_per_token(self, bits: int) -> int:
        """Keys and values of one token over all layers; scales a channel are not of a token."""
        return Share(self, 0, 1).kv_bytes_per_token(bits)


@dataclass(frozen=True, slots=True)
class Share:
    """What rank `rank` of `ranks` holds of a model.

    Raises:
        ConfigError: heads cannot be split between so many.
    """

    shape: ModelShape
    rank: int
    ranks: int

    def __post_init__(self) -> None:
        shape, ranks = self.shape, self.ranks
        repeats = ranks % shape.num_kv_heads == 0 and shape.num_heads % ranks == 0
        if ranks > shape.num_kv_heads and not repeats:
            raise ConfigError(
                "devices",
                ranks,
                f"a number that splits the {shape.num_kv_heads} KV heads of {shape.name}, or a "
                f"multiple of it that divides its {shape.num_heads} heads",
            )

    @property
    def kv_heads(self) -> int:
        return max(self._part(self.shape.num_kv_heads), 1)

    @property
    def heads(self) -> int:
        shape = self.shape
        if shape.num_kv_heads < self.ranks:
            return self._part(shape.num_heads)
        return self.kv_heads * (shape.num_heads // shape.num_kv_heads)

    def products(self) -> Iterator[Matrix]:
        """What every token is multiplied with, the head last."""
        shape = self.shape
        queries, keys = self.heads * shape.head_dim, self.kv_heads * shape.head_dim
        inner = self._part(shape.intermediate)
        for _ in range(shape.num_layers):
            yield Matrix(queries + 2 * keys, shape.hidden)
            yield Matrix(shape.hidden, queries)
            yield Matrix((2 if shape.gated else 1) * inner, shape.hidden)
            yield Matrix(shape.hidden, inner)
        yield Matrix(self._part(shape.vocab), shape.hidden)

    def tables(self) -> Iterator[Matrix]:
        """What one row a token is read of, besides a head that is the embedding, too."""
        shape = self.shape
        if not shape.tied:
            yield Matrix(self._part(shape.vocab), shape.hidden)
        if shape.learned_positions:
            yield Matrix(shape.learned_positions, shape.hidden)

    def matrices(self) -> Iterator[Matrix]:
        """All of them."""
        yield from self.products()
        yield from self.tables()

    def vector_elements(self) -> int:
        """Norms and biases."""
        shape = self.shape
        queries, keys = self.heads * shape.head_dim, self.kv_heads * shape.head_dim
        layer = shape.norms * shape.hidden + (2 * shape.head_dim if shape.head_norms else 0)
        final = shape.hidden
        if shape.qkv_bias or shape.biased:
            layer += queries + 2 * keys
        if shape.biased:
            layer += shape.norms * shape.hidden + 2 * shape.hidden
            layer += (2 if shape.gated else 1) * self._part(shape.intermediate)
            final *= 2
        return shape.num_layers * layer + final

    def kv_bytes_per_token(self, bits: int) -> int:
        return 2 * self.shape.num_layers * self.kv_heads * self.shape.head_dim * bits // 8

    def _part(self, total: int) -> int:
        """As even as it gets, the first ranks have one more."""
        return total // self.ranks + (self.rank < total % self.ranks)


def shape_of_package(name: str, model: ModelInfo) -> ModelShape:
    """The shape in a package's manifest, which does not tell of norms of heads and biases; they
    are less than a thousandth of the bytes."""
    return ModelShape(
        name=name,
        num_layers=model.num_layers,
        hidden=model.hidden_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        intermediate=model.intermediate_size,
        vocab=model.vocab_size,
        context_tokens=model.context_tokens,
        tied=model.tied_embeddings,
        gated=model.architecture != "gpt2",
        source=f"{name}/manifest.json",
    )
