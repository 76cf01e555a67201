"""One rank's part of a decoder: rows and columns of its weights, heads of its cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.exporters.archs.spec import DecoderSpec
from headrace.exporters.graph.attention import KvScales
from headrace.exporters.graph.decoder import DecoderParts
from headrace.exporters.graph.linear import Weight
from headrace.exporters.quant.formats import Blocks
from headrace.runtime.errors import ConfigError, ExportError
from headrace.runtime.shares import RankShare, Span, split_decoder

Float = NDArray[np.float32]


def split_spec(spec: DecoderSpec, ranks: int) -> tuple[RankShare, ...]:
    """The part of each rank.

    Raises:
        ConfigError: heads cannot be split between so many.
        ExportError: the model needs sums over ranks that graphs are not cut at.
    """
    if spec.wide_head_norms:
        raise ExportError(
            f"{spec.architecture} normalizes queries across all heads, which ranks do not share; "
            "export it without --tensor-parallel"
        )
    if ranks < 2:
        raise ConfigError("tensor_parallel", ranks, "2 or more")
    return split_decoder(
        spec.architecture,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        intermediate=spec.intermediate_size,
        vocab=spec.vocab_size,
        ranks=ranks,
    )


def shard_parts(parts: DecoderParts, share: RankShare, *, first: bool) -> DecoderParts:
    """What a rank's graphs are built from; formats are still those of the whole.

    Args:
        first: whether this rank adds the biases of what is summed over ranks.
    """
    cut = _Cut(parts.spec, share)
    spec = dataclasses.replace(
        parts.spec,
        num_heads=share.heads.size,
        num_kv_heads=share.kv_heads.size,
        intermediate_size=share.inner.size,
        vocab_size=share.tokens.size,
    )
    return dataclasses.replace(
        parts,
        spec=spec,
        weight=lambda *names: _sliced(parts.weight(*names), *cut.slices(names)),
        vector=lambda name: cut.vector(name, parts.vector(name)),
        kv_scales=_scales(parts.kv_scales, share.kv_heads),
        adds_biases=first,
    )


@dataclass(frozen=True, slots=True)
class _Slice:
    """Of outputs or inputs of stacked weights: indices; None for all."""

    indices: NDArray[np.int64] | None


class _Cut:
    """Which rows and columns of which weight a rank has."""

    def __init__(self, spec: DecoderSpec, share: RankShare) -> None:
        names, dim = spec.layer, spec.head_dim
        heads, kv_heads = share.heads.times(dim), share.kv_heads.times(dim)
        queries, keys, inner = spec.num_heads * dim, spec.num_kv_heads * dim, spec.intermediate_size
        self._rows: dict[str, tuple[int, Span]] = {}
        self._columns: dict[str, Span] = {}
        for layer in range(spec.num_layers):
            rows = {
                names.query: (queries, heads),
                names.key: (keys, kv_heads),
                names.value: (keys, kv_heads),
                names.up: (inner, share.inner),
            }
            if names.gate is not None:
                rows[names.gate] = (inner, share.inner)
            self._rows |= {name.format(layer): place for name, place in rows.items()}
            self._columns[names.output.format(layer)] = heads
            self._columns[names.down.format(layer)] = share.inner
        for name in (spec.embed, spec.head):
            self._rows[name] = (spec.vocab_size, share.tokens)

    def slices(self, names: Sequence[str]) -> tuple[_Slice, _Slice]:
        """Outputs and inputs of weights that are stacked along their outputs."""
        if names[0] not in self._rows:
            span = self._columns.get(names[0])
            return _Slice(None), _Slice(None if span is None else _indices(span))
        start, parts = 0, []
        for name in names:
            size, span = self._rows[name]
            parts.append(start + _indices(span))
            start += size
        return _Slice(np.concatenate(parts)), _Slice(None)

    def vector(self, name: str, values: Float) -> Float:
        """A norm, which all ranks have, or a bias."""
        owner, _, kind = name.rpartition(".")
        if kind != "bias" or owner not in self._rows:
            return values
        return values[_indices(self._rows[owner][1])]


def _sliced(weight: Weight, rows: _Slice, columns: _Slice) -> Weight:
    out, inputs = rows.indices, columns.indices
    shape = (
        weight.shape[0] if out is None else len(out),
        weight.shape[1] if inputs is None else len(inputs),
    )

    def load() -> Float:
        values = weight.load()
        values = values if out is None else values[out]
        return values if inputs is None else np.ascontiguousarray(values[:, inputs])

    def blocks() -> Blocks | None:
        whole = weight.blocks() if inputs is None else None
        return whole if whole is None or out is None else whole.rows(out)

    def gram() -> Float | None:
        whole = weight.gram()
        return whole if whole is None or inputs is None else whole[np.ix_(inputs, inputs)]

    return Weight(weight.name, shape, load, blocks, gram)


def _scales(scales: KvScales | None, heads: Span) -> KvScales | None:
    if scales is None:
        return None
    own = slice(heads.first, heads.stop)
    return dataclasses.replace(scales, key=scales.key[:, own], value=scales.value[:, own])


def _indices(span: Span) -> NDArray[np.int64]:
    return np.arange(span.first, span.stop)
