"""Sizes of models, and how many bytes a rank of a tensor-parallel group holds of one.

How matrices are split is in `runtime.shares`. Norms are on every rank, what is added to a sum over
ranks (biases of output and down) on the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from headrace.runtime.manifest import ModelInfo
from headrace.runtime.shares import RankShare, split_decoder


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


@dataclass(frozen=True)
class Share:
    """What rank `rank` of `ranks` holds of a model.

    Raises:
        ConfigError: heads cannot be split between so many.
    """

    shape: ModelShape
    rank: int
    ranks: int

    def __post_init__(self) -> None:
        assert self.part is not None  # found now, so that it raises now

    @cached_property
    def part(self) -> RankShare:
        shape = self.shape
        return split_decoder(
            shape.name,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            intermediate=shape.intermediate,
            vocab=shape.vocab,
            ranks=self.ranks,
        )[self.rank]

    @property
    def kv_heads(self) -> int:
        return self.part.kv_heads.size

    @property
    def heads(self) -> int:
        return self.part.heads.size

    def products(self) -> Iterator[Matrix]:
        """What every token is multiplied with, the head last."""
        shape = self.shape
        queries, keys = self.heads * shape.head_dim, self.kv_heads * shape.head_dim
        inner = self.part.inner.size
        for _ in range(shape.num_layers):
            yield Matrix(queries + 2 * keys, shape.hidden)
            yield Matrix(shape.hidden, queries)
            yield Matrix((2 if shape.gated else 1) * inner, shape.hidden)
            yield Matrix(shape.hidden, inner)
        yield Matrix(self.part.tokens.size, shape.hidden)

    def tables(self) -> Iterator[Matrix]:
        """What one row a token is read of, besides a head that is the embedding, too."""
        shape = self.shape
        if not shape.tied:
            yield Matrix(self.part.tokens.size, shape.hidden)
        if shape.learned_positions:
            yield Matrix(shape.learned_positions, shape.hidden)

    def matrices(self) -> Iterator[Matrix]:
        """All of them."""
        yield from self.products()
        yield from self.tables()

    def vector_elements(self) -> int:
        """Norms and biases."""
        shape, summed = self.shape, 2 if self.rank == 0 else 0
        queries, keys = self.heads * shape.head_dim, self.kv_heads * shape.head_dim
        layer = shape.norms * shape.hidden + (2 * shape.head_dim if shape.head_norms else 0)
        final = shape.hidden
        if shape.qkv_bias or shape.biased:
            layer += queries + 2 * keys
        if shape.biased:
            layer += shape.norms * shape.hidden + summed * shape.hidden
            layer += (2 if shape.gated else 1) * self.part.inner.size
            final *= 2
        return shape.num_layers * layer + final

    def kv_bytes_per_token(self, bits: int) -> int:
        return 2 * self.shape.num_layers * self.kv_heads * self.shape.head_dim * bits // 8


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
