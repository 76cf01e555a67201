"""Attention of a step: packed queries, keys and values to `[B, S, .]`, GroupQueryAttention, back.

`gather_index` and `scatter_index` are graph inputs, and the cache is an input and an output of
every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from headrace.exporters.archs.spec import DecoderSpec, RopeSpec
from headrace.exporters.graph.builder import MICROSOFT, GraphBuilder, graph_input, named_output
from headrace.exporters.graph.norms import Norms
from headrace.exporters.graph.positions import emit_positions, emit_second_table
from headrace.exporters.graph.rope import rope_tables, switch_tokens
from headrace.exporters.graph.step_inputs import StepInputs
from headrace.runtime import manifest as io

Float = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class KvScales:
    """Scales of a quantized cache: value = code * scale. float32 [layers, kv_heads, head_dim] each.

    `bits` is 8 or 4; two 4-bit codes share a byte.
    """

    key: Float
    value: Float
    bits: int = 8


class Attention:
    """Builds the attention of one layer after the other; collects the inputs and outputs of the
    cache.

    Args:
        norms: those of single heads are of the same kind as the layers'.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        scales: KvScales | None,
        g: GraphBuilder,
        step: StepInputs,
        norms: Norms,
    ) -> None:
        self._spec, self._scales, self._g, self._step = spec, scales, g, step
        self._norms = norms
        # Rows of packed positions beyond the context can occur as padding of the longest row.
        self._table_rows = spec.context_tokens + io.MAX_ROW_TOKENS
        self._ropes = [self._rope(i, rope) for i, rope in enumerate(spec.ropes)]
        self.cache_inputs: list[ir.Value] = []
        self.cache_outputs: list[ir.Value] = []

    def attend(self, layer: int, qkv: ir.Value) -> ir.Value:
        """float32 [N, (heads + 2 kv_heads) * head_dim] -> [N, heads * head_dim]."""
        spec, g, step = self._spec, self._g, self._step
        attention = spec.attention[layer]
        past_key, past_value = self._cache_inputs(layer)
        key_scale, value_scale = self._cache_scales(layer)
        cos = sin = position_ids = None
        if attention.rope is not None:
            cos, sin, position_ids = self._ropes[spec.ropes.index(attention.rope)]
        inputs = [
            self._unpacked(layer, qkv),
            None,
            None,
            past_key,
            past_value,
            step.seqlens_k,
            step.total,
            cos,
            sin,
            position_ids,
            step.attention_bias,
            None,
            key_scale,
            value_scale,
            None,
            None,
            step.query_seqlens,
        ]
        while inputs[-1] is None:
            inputs.pop()
        attributes: dict[str, int | float | str] = {
            "num_heads": spec.num_heads,
            "kv_num_heads": spec.num_kv_heads,
            "scale": spec.attention_scale,
            "do_rotary": int(attention.rope is not None),
        }
        if spec.attention_softcap is not None:
            attributes["softcap"] = spec.attention_softcap
        if attention.window_tokens is not None:
            attributes["local_window_size"] = attention.window_tokens
        if self._scales is not None:
            attributes |= {
                "k_quant_type": "PER_CHANNEL",
                "v_quant_type": "PER_CHANNEL",
                "kv_cache_bit_width": self._scales.bits,
            }
        attended, key, value = g.ops(
            "GroupQueryAttention", *inputs, outputs=3, domain=MICROSOFT, attributes=attributes
        )
        self._cache_outputs(layer, key, value)
        width = spec.num_heads * spec.head_dim
        flat = g.op("Reshape", attended, g.constant("flat_heads", _ints(-1, width)))
        return g.op("Gather", flat, step.scatter)

    def _unpacked(self, layer: int, qkv: ir.Value) -> ir.Value:
        """[N, .] -> [B, S, .], with queries and keys normalized where the model does that."""
        spec, g, names = self._spec, self._g, self._spec.layer
        if names.query_norm is None or names.key_norm is None:
            return g.op("Gather", qkv, self._step.gather)
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        if spec.wide_head_norms:
            widths = g.constant("head_widths", _ints(*(n * spec.head_dim for n in heads)))
            parts = g.ops("Split", qkv, widths, outputs=3, attributes={"axis": 1})
        else:
            by_head = g.op("Reshape", qkv, g.constant("by_head", _ints(0, -1, spec.head_dim)))
            counts = g.constant("head_counts", _ints(*heads))
            parts = g.ops("Split", by_head, counts, outputs=3, attributes={"axis": 1})
        query, key = (
            self._norms.plain(part, name, layer)
            for part, name in zip(parts[:2], (names.query_norm, names.key_norm), strict=True)
        )
        joined = g.op("Concat", query, key, parts[2], attributes={"axis": 1})
        unpacked = g.op("Gather", joined, self._step.gather)
        if spec.wide_head_norms:
            return unpacked
        return g.op("Reshape", unpacked, g.constant("heads_joined", _ints(0, 0, -1)))

    def _rope(self, number: int, rope: RopeSpec) -> tuple[ir.Value, ir.Value, ir.Value | None]:
        """cos, sin and, where the operator is not to count for itself, rows of them [B, S]."""
        g, step, rows = self._g, self._step, self._table_rows
        tables = cache(lambda: rope_tables(rope, rows))
        name = f"rope.{number}" if number else "rope"
        cos = g.weight(f"{name}.cos", lambda: tables()[0])
        sin = g.weight(f"{name}.sin", lambda: tables()[1])
        switch = switch_tokens(rope)
        if switch is None:
            return cos, sin, step.position_ids
        positions = emit_positions(g, step)
        return cos, sin, emit_second_table(g, step, positions, switch, rows)

    def _cache_inputs(self, layer: int) -> tuple[ir.Value, ir.Value]:
        key, value = (
            graph_input(name.format(layer), self._cache_dtype, self._cache_shape)
            for name in (io.PAST_KEY, io.PAST_VALUE)
        )
        self.cache_inputs += [key, value]
        return key, value

    def _cache_outputs(self, layer: int, key: ir.Value, value: ir.Value) -> None:
        for tensor, name in ((key, io.PRESENT_KEY), (value, io.PRESENT_VALUE)):
            self.cache_outputs.append(
                named_output(tensor, name.format(layer), self._cache_dtype, self._cache_shape)
            )

    def _cache_scales(self, layer: int) -> tuple[ir.Value | None, ir.Value | None]:
        scales = self._scales
        if scales is None:
            return None, None
        shape = (1, self._spec.num_kv_heads, 1, self._spec.head_dim)
        return (
            self._g.weight(f"kv_scale.key.{layer}", lambda: scales.key[layer].reshape(shape)),
            self._g.weight(f"kv_scale.value.{layer}", lambda: scales.value[layer].reshape(shape)),
        )

    @property
    def _cache_dtype(self) -> ir.DataType:
        if self._scales is None:
            return ir.DataType.FLOAT
        return ir.DataType.INT8 if self._scales.bits == 8 else ir.DataType.UINT8

    @property
    def _cache_shape(self) -> list[int | str]:
        packed = 1 if self._scales is None else 8 // self._scales.bits  # values to an element
        return ["B", self._spec.num_kv_heads, "C", self._spec.head_dim // packed]


def _ints(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)
