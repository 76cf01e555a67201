"""Tensors as the graph builder wants them, whatever form their family stores them in."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.exporters.archs.spec import DecoderSpec
from headrace.exporters.checkpoint.values import LazyTensor


def tensor_views(spec: DecoderSpec, tensors: Mapping[str, LazyTensor]) -> Mapping[str, LazyTensor]:
    """The same tensors, norms with the gains that they multiply with."""
    if not spec.gain_offset:
        return tensors
    names = spec.layer
    norms = [*names.norms(), *(n for n in (names.query_norm, names.key_norm) if n is not None)]
    gains = {f"{n.format(i)}.weight" for n in norms for i in range(spec.num_layers)}
    gains.add(f"{spec.final_norm}.weight")
    return {
        name: tensor.plus(spec.gain_offset) if name in gains else tensor
        for name, tensor in tensors.items()
    }
