"""Tensors as the graph builder wants them, whatever form their family stores them in."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from headrace.exporters.archs.spec import DecoderSpec
from headrace.exporters.archs.tensors import linear_shapes
from headrace.exporters.checkpoint.values import LazyTensor


def tensor_views(spec: DecoderSpec, tensors: Mapping[str, LazyTensor]) -> Mapping[str, LazyTensor]:
    """Every weight under its name in the spec, norms with the gains that they multiply with."""
    order = spec.ropes[0].head_order(spec.head_dim) if spec.ropes else None
    if not spec.gain_offset and not spec.stored and order is None:
        return tensors
    views = dict(tensors)
    shapes = linear_shapes(spec)
    for layer in range(spec.num_layers):
        for stored in spec.stored:
            for kind in ("weight", "bias"):
                whole = tensors.get(f"{stored.name.format(layer)}.{kind}")
                if whole is None:
                    continue
                if stored.transposed and kind == "weight":
                    whole = whole.transposed()
                start = 0
                for part in stored.parts:
                    stop = start + shapes[part][0][0]
                    name = f"{part.format(layer)}.{kind}"
                    views[name] = whole.rows(start, stop, name)
                    start = stop
    names = spec.layer
    norms = [*names.norms(), *(n for n in (names.query_norm, names.key_norm) if n is not None)]
    gains = {f"{n.format(i)}.weight" for n in norms for i in range(spec.num_layers)}
    for name in (*gains, f"{spec.final_norm}.weight"):
        if spec.gain_offset and name in views:
            views[name] = views[name].plus(spec.gain_offset)
    turned = [n.format(i) for n in (names.query, names.key) for i in range(spec.num_layers)]
    for full in (f"{name}.{kind}" for name in turned for kind in ("weight", "bias")):
        if order is not None and full in views:
            views[full] = views[full].reordered(_of_heads(order, views[full].shape[0]))
    return views


def _of_heads(order: list[int], rows: int) -> NDArray[np.int64]:
    """The order of one head, for all the heads in this many rows."""
    heads = np.arange(rows, dtype=np.int64).reshape(-1, len(order))
    return heads[:, order].reshape(rows)
