"""What the manifest says about the graphs and weights of a target."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from headrace.exporters.graph.weights import WeightStore
from headrace.runtime.manifest import GraphInfo, TensorInfo

WEIGHTS_FILE = "weights.bin"
MIN_ONNXRUNTIME = {"ragged": "1.32", "tree": "1.32", "uniform": "1.31", "paged": "1.31"}


def graph_info(model: ir.Model, form: str, file: str) -> GraphInfo:
    def plain(values: Sequence[ir.Value]) -> tuple[str, ...]:
        names = [value.name or "" for value in values]
        return tuple(n for n in names if not n.startswith(("past_", "present_")))

    return GraphInfo(
        form=form,
        file=file,
        min_onnxruntime=MIN_ONNXRUNTIME[form],
        inputs=plain(model.graph.inputs),
        outputs=plain(model.graph.outputs),
    )


def tensor_infos(store: WeightStore) -> tuple[TensorInfo, ...]:
    return tuple(
        TensorInfo(name=name, format=fmt, shape=shape, bytes=nbytes)
        for name, fmt, shape, nbytes in store.described()
    )
