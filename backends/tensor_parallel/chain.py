"""The pieces of a rank as one session: they run in order, with a sum over ranks between them.

Offers what backends use of an `InferenceSession`, so that the backend of a device runs a rank as it
runs a whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.backends.ort_import import load_onnxruntime
from headrace.backends.tensor_parallel import heads
from headrace.runtime import manifest as io

_ENTERS = {io.PARTIAL: io.SUMMED, io.RESIDUAL: io.CARRIED}


class _Named(NamedTuple):
    """As ONNX Runtime describes an input or output."""

    name: str
    shape: Sequence[Any]


class Collective(Protocol):
    """What ranks do together. All of them call the same methods in the same order."""

    def all_reduce(self, values: NDArray[Any]) -> None:
        """Replace contiguous values by their sum over ranks; the same bits on all of them."""
        ...

    def all_gather(self, values: NDArray[Any]) -> NDArray[Any]:
        """[ranks, ...] of what each rank gave."""
        ...

    def close(self) -> None: ...


class Chain:
    """Runs sessions in their order."""

    def __init__(self, pieces: Sequence[Any], collective: Collective) -> None:
        self._pieces, self.collective = pieces, collective
        self._inputs = [[i.name for i in piece.get_inputs()] for piece in pieces]
        self._outputs = [piece.get_outputs() for piece in pieces]
        self.dimensions = {i.name: i.shape for piece in pieces for i in piece.get_inputs()}

    def get_inputs(self) -> Sequence[Any]:
        """Of all pieces, but what passes between them."""
        return [
            _Named(name, shape)
            for name, shape in self.dimensions.items()
            if name not in _ENTERS.values()
        ]

    def get_outputs(self) -> Sequence[Any]:
        """Of all pieces, but what passes between them, and the entropy of all ranks' logits."""
        given = [output for outputs in self._outputs for output in outputs]
        within = (*_ENTERS, io.HEAD_SUMS)
        return [*(o for o in given if o.name not in within), _Named(io.ENTROPY, ["R"])]

    def io_binding(self) -> ChainBinding:
        return ChainBinding(self)

    def run_with_iobinding(self, binding: ChainBinding, options: Any = None) -> None:
        steps = binding.steps or self._bind(binding)
        binding.steps = steps
        for piece, (bound, partial) in zip(self._pieces, steps, strict=True):
            piece.run_with_iobinding(bound, options)
            if partial is not None:
                self.collective.all_reduce(partial)
        everybody = self.collective.all_gather(binding.head_sums)
        binding.outputs[io.ENTROPY].numpy()[...] = heads.entropy_nats(everybody)

    def _bind(self, binding: ChainBinding) -> list[tuple[Any, NDArray[Any] | None]]:
        """Bindings of all pieces; what passes from one to the next lies in one of two places."""
        sizes = binding.sizes()
        places: dict[tuple[str, int, tuple[int, ...]], tuple[NDArray[Any], Any]] = {}
        passing: dict[str, Any] = {}
        steps = []
        for number, piece in enumerate(self._pieces):
            bound, partial = piece.io_binding(), None
            for name in self._inputs[number]:
                bound.bind_ortvalue_input(name, passing.get(name) or binding.inputs[name])
            passing = {}
            for output in self._outputs[number]:
                if output.name in binding.outputs:
                    bound.bind_ortvalue_output(output.name, binding.outputs[output.name])
                    continue
                shape = tuple(sizes.get(size, size) for size in output.shape)
                key = (output.name, number % 2, shape)
                if key not in places:
                    array = np.empty(shape, np.float32)
                    places[key] = array, load_onnxruntime().OrtValue.ortvalue_from_numpy(array)
                array, value = places[key]
                bound.bind_ortvalue_output(output.name, value)
                if output.name == io.HEAD_SUMS:
                    binding.head_sums = array
                else:
                    passing[_ENTERS[output.name]] = value
                if output.name == io.PARTIAL:
                    partial = array
            steps.append((bound, partial))
        binding.places = places
        return steps


class ChainBinding:
    """Takes what is bound, by name; pieces are bound when it runs for the first time since."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self.inputs: dict[str, Any] = {}
        self.outputs: dict[str, Any] = {}
        self.steps: list[tuple[Any, NDArray[Any] | None]] = []
        self.places: object = None  # kept alive
        self.head_sums: NDArray[Any] = np.empty((0, 0), np.float32)

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        self.inputs[name] = value
        self.steps = []

    def bind_ortvalue_output(self, name: str, value: Any) -> None:
        self.outputs[name] = value
        self.steps = []

    def sizes(self) -> dict[Any, int]:
        """Of named dimensions."""
        found: dict[Any, int] = {}
        for name, value in self.inputs.items():
            found |= dict(zip(self._chain.dimensions[name], value.shape(), strict=True))
        return found
