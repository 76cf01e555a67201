"""What each weight's format costs: mean KL of next-token distributions with only it quantized.

One graph holds every weight twice, as the reference has it and in the format in question, and an
input says for each which product counts. So all weights are measured with one session.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from headrace.exporters.graph.builder import GraphBuilder, graph_input
from headrace.exporters.graph.decoder import DecoderParts, build_decoder
from headrace.exporters.graph.linear import LinearFormat, MlpWeights, Weight, stacked_mlp
from headrace.exporters.graph.mixed import MixedFormat
from headrace.exporters.graph.weights import WeightStore
from headrace.exporters.rotation import mixed_readers
from headrace.exporters.validate import GraphRunner
from headrace.runtime import manifest as io
from headrace.runtime.fidelity import log_softmax, mean_kl_nats

_SWITCHES = "switches"  # bool [weights]: take the candidate's product
_CANDIDATE = "@candidate"


@dataclasses.dataclass(frozen=True, slots=True)
class WeightCost:
    """A weight [out, in] and the mean KL that its format costs."""

    shape: tuple[int, int]
    nats: float


def measure_sensitivity(
    parts: DecoderParts,
    reference: LinearFormat,
    choose: Callable[[str], LinearFormat],
    token_ids: Sequence[int],
    folder: Path,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Mapping[str, WeightCost]:
    """What each weight costs alone, by its name, in graph order.

    Args:
        reference: the format of all other weights.
        choose: the format in question, by name of the weight.
        token_ids: the text; one sequence.
        folder: takes the graph and its weights.
        advance: called with how many weights are done, of how many.
    """
    switched = SwitchedFormat(reference, choose, mixed_readers(parts.spec))
    path = folder / "switched.onnx"
    formats = dataclasses.replace(
        parts, layer_format=switched, head_format=switched, kv_scales=None
    )
    with WeightStore(folder, "switched.bin") as store:
        model = build_decoder(formats, store, "uniform")
        model.graph.inputs.append(switched.switches)
        ir.save(model, path)
    runner = GraphRunner(path, len(token_ids))
    ids = list(token_ids)

    def logits(chosen: int | None) -> np.ndarray:
        switches = np.zeros(len(switched.shapes), np.bool_)
        if chosen is not None:
            switches[chosen] = True
        runner.reset()
        return runner.append(ids, {_SWITCHES: switches})[io.LOGITS]

    expected = log_softmax(logits(None))
    costs = {}
    for i, (name, shape) in enumerate(switched.shapes.items()):
        costs[name] = WeightCost(shape, mean_kl_nats(expected, log_softmax(logits(i))))
        advance(i + 1, len(switched.shapes))
    return costs


class SwitchedFormat:
    """Two formats at once; `shapes` has the weights in the order of `switches`."""

    name = "switched"

    def __init__(
        self,
        reference: LinearFormat,
        choose: Callable[[str], LinearFormat],
        mixed: Sequence[str] = (),
    ) -> None:
        self._reference = reference
        self._candidate = MixedFormat(lambda name: choose(name.replace(_CANDIDATE, "")))
        for name in mixed:
            self._candidate.mix_inputs_of(name + _CANDIDATE)
        self.shapes: dict[str, tuple[int, int]] = {}
        self.switches = graph_input(_SWITCHES, ir.DataType.BOOL, ["W"])

    def linear(self, g: GraphBuilder, x: ir.Value, weight: Weight) -> ir.Value:
        plain = self._reference.linear(g, x, weight)
        return self._either(g, weight, self._candidate.linear(g, x, _renamed(weight)), plain)

    def embed(self, g: GraphBuilder, ids: ir.Value, weight: Weight) -> ir.Value:
        plain = self._reference.embed(g, ids, weight)
        return self._either(g, weight, self._candidate.embed(g, ids, _renamed(weight)), plain)

    def tied_head(self, g: GraphBuilder, x: ir.Value, weight: Weight) -> ir.Value:
        plain = self._reference.tied_head(g, x, weight)
        return self._either(g, weight, self._candidate.tied_head(g, x, _renamed(weight)), plain)

    def gated_mlp(self, g: GraphBuilder, x: ir.Value, weights: MlpWeights) -> ir.Value:
        self._candidate.mix_inputs_of(weights.down.name + _CANDIDATE)
        return stacked_mlp(self, g, x, weights)

    def _either(
        self, g: GraphBuilder, weight: Weight, candidate: ir.Value, plain: ir.Value
    ) -> ir.Value:
        self.shapes.setdefault(weight.name, weight.shape)
        index = list(self.shapes).index(weight.name)
        number = g.constant(f"switch_{index}", np.array(index, np.int64))
        return g.op("Where", g.op("Gather", self.switches, number), candidate, plain)


def _renamed(weight: Weight) -> Weight:
    """Both formats may store a part of the same name."""
    return dataclasses.replace(weight, name=weight.name + _CANDIDATE)
