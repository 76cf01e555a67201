"""Sessions with their cache bound.

Binding keys and values of all layers on both sides takes longer than all else that a new step shape
needs (SmolLM2-135M: 120 tensors, 0.2 of 0.3 ms). It depends on the range of slots alone, so steps
of all shapes share it and bind only what is theirs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from headrace.backends.cpu_avx512.kv_storage import KvStorage
from headrace.runtime import manifest as io

_CROSSING = tuple(name.format("") for name in (io.LAYER_RESIDUAL, io.LAYER_NORMED))
_CACHE_NAMES = ((io.PAST_KEY, io.PRESENT_KEY), (io.PAST_VALUE, io.PRESENT_VALUE))
_MAX_BINDINGS = 32
Tensors = Mapping[str, Any]  # OrtValues


class Stage:
    """A session of consecutive layers, or of the whole graph."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.inputs = [given.name for given in session.get_inputs()]
        self.outputs = [given.name for given in session.get_outputs()]
        self._bindings: OrderedDict[tuple[int, int, bool], SlotBinding] = OrderedDict()

    def unbound(self) -> Stage:
        """The same session with nothing bound."""
        return Stage(self.session)

    @property
    def crossing(self) -> list[str]:
        """What it gives to the next one, if it is not the last."""
        return [name for name in self.outputs if name.startswith(_CROSSING)]

    def binding(self, kv: KvStorage, first: int, last: int, *, sampled: bool) -> SlotBinding:
        """Of slots [first, last); steps that want probabilities have more outputs than others."""
        key = (first, last, sampled)
        binding = self._bindings.get(key)
        if binding is None:
            binding = self._bindings[key] = SlotBinding(self, kv.bind_range(first, last))
            if len(self._bindings) > _MAX_BINDINGS:
                self._bindings.popitem(last=False)
        self._bindings.move_to_end(key)
        return binding


class SlotBinding:
    """A stage's io_binding to some slots. Steps that use it may not overlap.

    Args:
        cache: key and value of layer 0, of layer 1, ...
    """

    def __init__(self, stage: Stage, cache: list[Any]) -> None:
        self._inputs, self._outputs = stage.inputs, stage.outputs
        self._run = stage.session.run_with_iobinding
        self._binding = stage.session.io_binding()
        self._bound: Tensors | None = None
        self._bind(
            {
                name.format(i // 2): tensor
                for i, tensor in enumerate(cache)
                for name in _CACHE_NAMES[i % 2]
            }
        )

    def run(self, tensors: Tensors, options: Any = None) -> None:
        """Run a step of which these are all tensors beside the cache, the same names each time.

        Args:
            options: of ONNX Runtime.
        """
        if tensors is not self._bound:
            self._bound = None
            self._bind(tensors)
            self._bound = tensors
        self._run(self._binding, options)

    def _bind(self, tensors: Tensors) -> None:
        for name in self._inputs:
            if name in tensors:
                self._binding.bind_ortvalue_input(name, tensors[name])
        for name in self._outputs:
            if name in tensors:
                self._binding.bind_ortvalue_output(name, tensors[name])
