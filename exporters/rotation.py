"""Offline rotation of the residual stream, so that activations have no outliers left to quantize.

RMSNorm without its gain commutes with any orthogonal Q (the norm of a vector does not change), so
with the gains folded into the weights that follow them the whole stream can live in another basis
(SliceGPT, Ashkboos et al. 2024; QuaRot, Ashkboos et al. 2024; SpinQuant, Liu et al. 2024):

    embedding  E -> E Q                      reads into the stream
    q k v gate up  W -> W diag(gain) Q       read from it after a norm
    o down     W -> Q' W, bias -> Q' bias    write to it
    head       W -> W diag(gain) Q           if it is a weight of its own
    tied head  E Q, after a product with Q' diag(gain) Q of the few rows that need logits

Nothing is added to a layer at run time. Q is the same for every export of a size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

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


class RotatedSource:
    """A `WeightSource` in the rotated basis. Blocks of the checkpoint cannot be kept in it."""

    def __init__(self, source: WeightSource, spec: DecoderSpec) -> None:
        self._source, self._spec = source, spec
        self._rotation = orthogonal(spec.hidden_size)
        self._gain_before: dict[str, str] = {}
        self._writers: set[str] = set()
        self._norms = {f"{spec.final_norm}.weight"}
        names = spec.layer
        for layer in range(spec.num_layers):
            attention, mlp = (n.format(layer) for n in (names.attention_norm, names.mlp_norm))
            self._norms |= {f"{attention}.weight", f"{mlp}.weight"}
            for name in (names.query, names.key, names.value):
                self._gain_before[name.format(layer)] = f"{attention}.weight"
            for name in (names.gate, names.up):
                self._gain_before[name.format(layer)] = f"{mlp}.weight"
            self._writers |= {names.output.format(layer), names.down.format(layer)}
        if not spec.tied_embeddings:
            self._gain_before[spec.head] = f"{spec.final_norm}.weight"

    def weight(self, *names: str) -> Weight:
        """As `WeightSource.weight`."""
        plain = self._source.weight(*names)
        return Weight(plain.name, plain.shape, self._rotated(names, plain.load), lambda: None)

    def vector(self, name: str) -> Float:
        """As `WeightSource.vector`; gains of norms are one, since they are folded."""
        values = self._source.vector(name)
        if name in self._norms:
            return np.ones_like(values)
        if name.removesuffix(".bias") in self._writers:
            return np.asarray(values @ self._rotation)
        return values

    @cached_property
    def tied_head_matrix(self) -> Float:
        """M, float32 [hidden, hidden]: logits = (h @ M) @ (E Q)'."""
        gain = self._source.vector(f"{self._spec.final_norm}.weight")
        return np.asarray(self._rotation.T @ (gain[:, None] * self._rotation))

    def _rotated(self, names: tuple[str, ...], load: Callable[[], Float]) -> Callable[[], Float]:
        gain_name = self._gain_before.get(names[0])  # None for the embedding

        def rotated() -> Float:
            if names[0] in self._writers:
                return np.asarray(self._rotation.T @ load())
            gain = 1 if gain_name is None else self._source.vector(gain_name)
            return np.asarray((load() * gain) @ self._rotation, dtype=np.float32)

        return rotated
