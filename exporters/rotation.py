"""Offline rotation of the residual stream, so that activations have no outliers left to quantize.

RMSNorm without its gain commutes with any orthogonal Q (the norm of a vector does not change), so
with the gains folded into the weights that follow them the whole stream can live in another basis
(SliceGPT, Ashkboos et al. 2024; QuaRot, Ashkboos et al. 2024; SpinQuant, Liu et al. 2024):

    embedding  E -> E Q                      reads into the stream
    q k v gate up  W -> W diag(gain) Q       read from it after a norm
    o down     W -> Q' W, bias -> Q' bias    write to it
    head       W -> W diag(gain) Q           if it is a weight of its own
    tied head  E Q, after a product with Q' diag(gain) Q of the few rows that need logits

Likewise each head's values: attention mixes tokens, not channels, so with R orthogonal
[head_dim, head_dim]

    v          each head's rows W -> R' W, bias -> R' bias
    o          each head's columns W -> W R

which leaves no outliers in what `o` multiplies and in the value cache. Nothing is added to a layer
at run time. Q and R are the same for every export of a size.

A norm of what is written to the stream stands between `o` or `down` and the stream, and its gain
has no place on either side of Q: such models keep the stream as it is, and only heads are rotated.
What row INT8 reads from it is then mixed in runs at run time (`mixed_readers`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.exporters.archs.spec import DecoderSpec
from headrace.exporters.graph.linear import Weight
from headrace.exporters.quant.hadamard import hadamard
from headrace.exporters.weight_source import WeightSource

Float = NDArray[np.float32]
_SEED = 20240404


def orthogonal(size: int, seed: int = _SEED) -> Float:
    """A Hadamard matrix with random signs where one of this size is known, else a random one.

    All entries of a Hadamard matrix have one magnitude, so no channel keeps more of an outlier than
    any other. With random signs (a diagonal of +-1) it is not aligned with any structure of the
    model. Otherwise uniform over the orthogonal group: QR of a Gaussian, signs of R's diagonal
    fixed.
    """
    rng = np.random.default_rng(seed)
    signs = hadamard(size)
    if signs is not None:
        rows = rng.choice(np.array([-1.0, 1.0]), size)
        return np.asarray(rows[:, None] * signs / np.sqrt(size), dtype=np.float32)
    q, r = np.linalg.qr(rng.standard_normal((size, size)))
    return np.asarray(q * np.sign(np.diag(r)), dtype=np.float32)


def stream_obstacle(spec: DecoderSpec) -> str | None:
    """Why the residual stream cannot be rotated; None where it can."""
    if spec.layer.attention_post_norm or spec.layer.mlp_post_norm:
        return "what layers add to the residual stream is normalized"
    if spec.norm == "layer":
        return "LayerNorm subtracts the mean of channels, which a rotation moves"
    return None


def mixed_readers(spec: DecoderSpec) -> list[str]:
    """Weights, as they are stacked, that read a stream which cannot be rotated: their inputs are to
    be mixed in runs instead, as those of `down` are."""
    if stream_obstacle(spec) is None:
        return []
    names = spec.layer
    first = [name for name in (names.gate, names.up) if name is not None]
    stacks = ([names.query, names.key, names.value], first)
    return [
        "+".join(name.format(i) for name in stack)
        for stack in stacks
        for i in range(spec.num_layers)
    ]


def rotation_report(spec: DecoderSpec, *, wanted: bool) -> dict[str, Any]:
    """For the precision report: what is rotated, and why the residual stream is not."""
    obstacle = stream_obstacle(spec) if wanted else "activations are not quantized by row"
    return {
        "residual_stream": obstacle is None,
        "why_not": obstacle,
        "mixed_in_runs": wanted and obstacle is not None,
        "value_heads": wanted,
    }


class RotatedSource:
    """A `WeightSource` in the rotated basis. Blocks of the checkpoint cannot be kept in it."""

    def __init__(self, source: WeightSource, spec: DecoderSpec) -> None:
        self._source, self._spec = source, spec
        self._rotation = None if stream_obstacle(spec) else orthogonal(spec.hidden_size)
        self._head_rotation = orthogonal(spec.head_dim)
        self._gain_before: dict[str, str] = {}
        names, layers = spec.layer, range(spec.num_layers)
        self._values = {names.value.format(i) for i in layers}
        self._outputs = {names.output.format(i) for i in layers}
        self._writers = self._outputs | {names.down.format(i) for i in layers}
        for i in layers:
            for norm, readers in (
                (names.attention_norm, (names.query, names.key, names.value)),
                (names.mlp_norm, [n for n in (names.gate, names.up) if n is not None]),
            ):
                if norm is not None:
                    gain = f"{norm.format(i)}.weight"
                    self._gain_before |= dict.fromkeys([r.format(i) for r in readers], gain)
        if not spec.tied_embeddings:
            self._gain_before[spec.head] = f"{spec.final_norm}.weight"
        self._norms = {*self._gain_before.values(), f"{spec.final_norm}.weight"}

    def weight(self, *names: str) -> Weight:
        """As `WeightSource.weight`."""
        plain = self._source.weight(*names)
        parts = [self._source.weight(name) for name in names]

        def load() -> Float:
            loaded = [self._rotated(n, p.load()) for n, p in zip(names, parts, strict=True)]
            return loaded[0] if len(loaded) == 1 else np.concatenate(loaded)

        return Weight(plain.name, plain.shape, load, lambda: None)

    def vector(self, name: str) -> Float:
        """As `WeightSource.vector`; gains of norms are one, since they are folded."""
        values = self._source.vector(name)
        if self._rotation is not None:
            if name in self._norms:
                return np.ones_like(values)
            if name.removesuffix(".bias") in self._writers:
                return np.asarray(values @ self._rotation)
        if name.removesuffix(".bias") in self._values:
            return self._by_head(values[None]).reshape(-1)
        return values

    @property
    def head_matrix(self) -> Callable[[], Float] | None:
        """M of `logits = (h @ M) @ (E Q)'`, float32 [hidden, hidden], or None without tied head."""
        rotation = self._rotation
        if rotation is None or not self._spec.tied_embeddings:
            return None

        def matrix() -> Float:
            gain = self._source.vector(f"{self._spec.final_norm}.weight")
            return np.asarray(rotation.T @ (gain[:, None] * rotation))

        return matrix

    @property
    def plain_basis(self) -> Callable[[], tuple[Float, Float]] | None:
        """See `DecoderParts`: h = g Q' n for a normed state n; with a tied head n @ M = h Q."""
        rotation = self._rotation
        if rotation is None:
            return None

        def matrices() -> tuple[Float, Float]:
            if self._spec.tied_embeddings:
                return np.ascontiguousarray(rotation.T), rotation
            gain = self._source.vector(f"{self._spec.final_norm}.weight")
            return np.asarray(rotation.T * gain), np.asarray(rotation / gain[:, None])

        return matrices

    def _rotated(self, name: str, weight: Float) -> Float:
        if name in self._outputs:
            weight = self._by_head(weight)
        if self._rotation is not None:
            if name in self._writers:
                return np.asarray(self._rotation.T @ weight)
            gain_name = self._gain_before.get(name)  # None for the embedding
            gain = 1 if gain_name is None else self._source.vector(gain_name)
            weight = np.asarray((weight * gain) @ self._rotation, dtype=np.float32)
        return self._by_head(weight.T).T if name in self._values else weight

    def _by_head(self, rows: Float) -> Float:
        """float32 [n, heads * head_dim]: every head's part times R."""
        heads = rows.reshape(len(rows), -1, self._spec.head_dim) @ self._head_rotation
        return np.asarray(heads, np.float32).reshape(rows.shape)
