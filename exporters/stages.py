"""`--stages`: where a decoder is cut into consecutive layers that cost about the same.

What a stage costs in a step is what it reads: the weights of its layers, and of the head if it is
the last. An embedding is looked up, not read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from headrace.exporters.archs.spec import DecoderSpec
from headrace.runtime.manifest import TensorInfo


def stage_layers(spec: DecoderSpec, tensors: Sequence[TensorInfo], num_stages: int) -> list[range]:
    """The layers of each stage; at least one each.

    Args:
        tensors: as stored.
    """
    layer_bytes = [0] * spec.num_layers
    head_bytes = 0
    before, after = spec.layer.up.split("{}")[0], r"(\d+)\."
    for tensor in tensors:
        if match := re.match(re.escape(before) + after, tensor.name):
            layer_bytes[int(match[1])] += tensor.bytes
        elif tensor.name == (spec.embed if spec.tied_embeddings else spec.head):
            head_bytes = tensor.bytes
    return balanced(layer_bytes, head_bytes, num_stages)


def balanced(costs: Sequence[int], last_cost: int, num_parts: int) -> list[range]:
    """Cut a list into parts whose dearest is as cheap as can be; the last part costs `last_cost`
    more than its items."""

    def cost(start: int, stop: int) -> int:
        return sum(costs[start:stop]) + (last_cost if stop == len(costs) else 0)

    @cache
    def best(stop: int, parts: int) -> tuple[int, int]:
        """Of the first `stop` items in `parts` parts: cost of the dearest, start of the last."""
        if parts == 1:
            return cost(0, stop), 0
        return min(
            (max(best(start, parts - 1)[0], cost(start, stop)), start)
            for start in range(parts - 1, stop)
        )

    ranges: list[range] = []
    stop = len(costs)
    for parts in range(num_parts, 0, -1):
        start = best(stop, parts)[1]
        ranges.insert(0, range(start, stop))
        stop = start
    return ranges
