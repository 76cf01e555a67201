"""Attention over a pool of blocks: PagedAttention, which takes packed tokens as they are.

Never executed on a card by the tests: they run these graphs through a reference evaluator written
from the operator's documentation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from headrace.exporters.archs.spec import DecoderSpec, RopeSpec
from headrace.exporters.graph.builder import MICROSOFT, GraphBuilder, graph_input, named_output
from headrace.exporters.graph.norms import Norms
from headrace.exporters.graph.rope import rope_tables, switch_tokens
from headrace.runtime import manifest as io
from headrace.runtime.errors import ExportError

Float = NDArray[np.float32]
_HALF = ir.DataType.FLOAT16


@dataclass(frozen=True, slots=True)
class PagedInputs:
    """Graph inputs that every layer uses; `positions` is None where no layer needs them."""

    cumulative: ir.Value
    cached: ir.Value
    block_table: ir.Value
    slot_mapping: ir.Value
    metadata: ir.Value
    logits_index: ir.Value
    positions: ir.Value | None

    def all(self) -> list[ir.Value]:
        rows = (self.cumulative, self.cached, self.block_table, self.slot_mapping, self.metadata)
        named = (*rows, self.logits_index)
        return [*named, *([] if self.positions is None else [self.positions])]


def paged_inputs(*, learned_positions: bool) -> PagedInputs:
    int32, int64 = ir.DataType.INT32, ir.DataType.INT64
    return PagedInputs(
        cumulative=graph_input(io.CUMULATIVE_SEQLENS, int32, ["B1"]),
        cached=graph_input(io.CACHED_SEQLENS, int32, ["B"]),
        block_table=graph_input(io.BLOCK_TABLE, int32, ["B", "L"]),
        slot_mapping=graph_input(io.SLOT_MAPPING, int32, ["N"]),
        metadata=graph_input(io.ATTENTION_METADATA, int32, [2]),
        logits_index=graph_input(io.LOGITS_INDEX, int64, ["R"]),
        positions=graph_input(io.POSITIONS, int64, ["N"]) if learned_positions else None,
    )


def block_tokens(head_dim: int) -> int:
    """Tokens of a block: what FlashAttention reads of a head of that width at a time."""
    if head_dim <= 64:
        return 256
    return 128 if head_dim <= 128 else 64


class PagedAttention:
    """Builds the attention of one layer after the other; collects the inputs and outputs of the
    cache.

    Norms of single heads are the operator's own: float32 sums, gains rounded to FP16.

    Args:
        norms: of the layers, for those across all heads.
        load: reads the gain of a norm by its checkpoint name.

    Raises:
        ExportError: positions of the model need a table that the operator cannot choose.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        g: GraphBuilder,
        step: PagedInputs,
        norms: Norms,
        load: Callable[[str], Float],
    ) -> None:
        self._spec, self._g, self._step = spec, g, step
        self._norms, self._load = norms, load
        self._ropes = [self._rope(i, rope) for i, rope in enumerate(spec.ropes)]
        self.cache_inputs: list[ir.Value] = []
        self.cache_outputs: list[ir.Value] = []

    def attend(self, layer: int, qkv: ir.Value) -> ir.Value:
        """float16 [N, (heads + 2 kv_heads) * head_dim] -> [N, heads * head_dim]."""
        spec, g, step = self._spec, self._g, self._step
        attention = spec.attention[layer]
        cos = sin = None
        if attention.rope is not None:
            cos, sin = self._ropes[spec.ropes.index(attention.rope)]
        gains = self._head_gains(layer)
        attributes: dict[str, int | float | str] = {
            "num_heads": spec.num_heads,
            "kv_num_heads": spec.num_kv_heads,
            "scale": spec.attention_scale,
            "do_rotary": int(attention.rope is not None),
        }
        if gains[0] is not None:
            attributes["qk_norm_epsilon"] = spec.norm_eps
        if spec.attention_softcap is not None:
            attributes["softcap"] = spec.attention_softcap
        if attention.window_tokens is not None:
            attributes["local_window_size"] = attention.window_tokens
        attended, key, value = g.ops(
            "PagedAttention",
            self._with_wide_norms(layer, qkv),
            None,
            None,
            *self._cache_inputs(layer),
            step.cumulative,
            step.cached,
            step.block_table,
            cos,
            sin,
            step.slot_mapping,
            None,
            *gains,
            None,
            None,
            step.metadata,
            outputs=3,
            domain=MICROSOFT,
            attributes=attributes,
        )
        for tensor, name in ((key, io.PRESENT_KEY), (value, io.PRESENT_VALUE)):
            self.cache_outputs.append(
                named_output(tensor, name.format(layer), _HALF, self._cache_shape)
            )
        return attended

    def _head_gains(self, layer: int) -> tuple[ir.Value | None, ir.Value | None]:
        """float16 [head_dim] of queries and keys, where each head has a norm of its own."""
        names = self._spec.layer
        if names.query_norm is None or names.key_norm is None or self._spec.wide_head_norms:
            return None, None
        query, key = (
            self._half(f"{name.format(layer)}.weight")
            for name in (names.query_norm, names.key_norm)
        )
        return query, key

    def _half(self, name: str) -> ir.Value:
        stored = self._g.weight(name, lambda: self._load(name).astype(np.float16))
        assert stored.shape is not None
        self._g.store.describe(name, stored.shape.numpy(), "fp16")
        return stored

    def _with_wide_norms(self, layer: int, qkv: ir.Value) -> ir.Value:
        """Queries and keys normalized across all heads, where the model does that."""
        spec, g, names = self._spec, self._g, self._spec.layer
        if not spec.wide_head_norms or names.query_norm is None or names.key_norm is None:
            return qkv
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        widths = np.array([n * spec.head_dim for n in heads], np.int64)
        parts = g.ops(
            "Split", qkv, g.constant("head_widths", widths), outputs=3, attributes={"axis": 1}
        )
        query, key = (
            self._norms.plain(part, name, layer)
            for part, name in zip(parts[:2], (names.query_norm, names.key_norm), strict=True)
        )
        return g.op("Concat", query, key, parts[2], attributes={"axis": 1})

    def _rope(self, number: int, rope: RopeSpec) -> tuple[ir.Value, ir.Value]:
        """cos and sin, float16 [positions, pairs]."""
        if switch_tokens(rope) is not None:
            raise ExportError(
                "a CUDA target cannot hold longrope, whose table depends on the context; "
                "export this model for the CPU alone"
            )
        # A block table may reach beyond the context by what its last block has left.
        rows = self._spec.context_tokens + io.MAX_ROW_TOKENS
        tables = cache(lambda: rope_tables(rope, rows))
        name = f"rope.{number}" if number else "rope"
        cos = self._g.weight(f"{name}.cos", lambda: tables()[0].astype(np.float16))
        sin = self._g.weight(f"{name}.sin", lambda: tables()[1].astype(np.float16))
        return cos, sin

    def _cache_inputs(self, layer: int) -> tuple[ir.Value, ir.Value]:
        key, value = (
            graph_input(name.format(layer), _HALF, self._cache_shape)
            for name in (io.PAST_KEY, io.PAST_VALUE)
        )
        self.cache_inputs += [key, value]
        return key, value

    @property
    def _cache_shape(self) -> list[int | str]:
        return ["M", "T", self._spec.num_kv_heads, self._spec.head_dim]
