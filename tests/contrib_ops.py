"""What CUDA graphs compute, in numpy: the operators that have no CPU kernel, or none for FP16.

    outputs = evaluator(graph_file).run(["logits"], feeds)

Written from the operators' documentation. Every operator takes its inputs as stored, computes in
float32 or wider and rounds its output once, as kernels do that multiply halves and sum in float32.
Products are summed in float64, so that a row's result does not show how many others there were.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

Array = NDArray[Any]
Float = NDArray[np.float32]
MICROSOFT = "com.microsoft"


def evaluator(graph: Path | ModelProto) -> ReferenceEvaluator:
    """Runs a graph; takes and gives arrays by name."""
    model = graph if isinstance(graph, ModelProto) else str(graph)
    return ReferenceEvaluator(model, new_ops=list(OPERATORS))


class Operator(OpRun):  # type: ignore[misc]
    """One that is looked up by its name and domain."""


class PagedAttention(Operator):
    """Attention over blocks of keys and values, of sequences that are packed one after the other.

    query [N, (heads + 2 kv_heads) * head_dim], or [N, heads * head_dim] with key and value beside
    it. Sequence b has the tokens cumulative[b] to cumulative[b + 1], at positions from past[b] on.
    Caches [blocks, block_tokens, kv_heads, head_dim] are changed in place and given back.
    block_table int32 [B, blocks of a sequence], -1 where there is none. slot_mapping int32 [N] says
    where in the flat cache a token is written, -1 for nowhere; it follows from the table if absent.
    """

    op_domain = MICROSOFT

    def _run(self, query: Array, *rest: Array | None, **attributes: Any) -> tuple[Array, ...]:
        key, value, key_cache, value_cache, cumulative, past, table, *optional = rest
        optional += [None] * (9 - len(optional))
        cos, sin, slots, sink, query_gain, key_gain, key_scale, value_scale, _ = optional
        assert key_cache is not None and value_cache is not None and table is not None
        assert cumulative is not None and past is not None
        assert sink is None and key_scale is None and value_scale is None
        heads, kv_heads = attributes["num_heads"], attributes["kv_num_heads"]
        _, block_tokens, _, width = key_cache.shape
        joined = query if key is None or value is None else np.concatenate([query, key, value], 1)
        by_head = joined.astype(np.float32).reshape(len(joined), heads + 2 * kv_heads, width)
        q, k, v = np.split(by_head, [heads, heads + kv_heads], axis=1)
        if query_gain is not None and key_gain is not None:
            epsilon = attributes.get("qk_norm_epsilon", 1e-6)
            q, k = rms_norm(q, query_gain, epsilon), rms_norm(k, key_gain, epsilon)
        spans = [range(a, b) for a, b in pairwise(cumulative)]
        positions = np.concatenate(
            [np.arange(len(s)) + p for s, p in zip(spans, past, strict=True)]
        )
        owners = np.repeat(np.arange(len(spans)), [len(span) for span in spans])
        if attributes.get("do_rotary", 0):
            assert cos is not None and sin is not None
            assert not attributes.get("rotary_interleaved", 0)
            q, k = (rotated(x, cos[positions], sin[positions]) for x in (q, k))
        if slots is None:
            blocks = table[owners, positions // block_tokens]
            slots = np.where(blocks < 0, -1, blocks * block_tokens + positions % block_tokens)
        written = slots >= 0
        for cache, new in ((key_cache, k), (value_cache, v)):
            cache.reshape(-1, kv_heads, width)[slots[written]] = new[written].astype(cache.dtype)
        output = np.zeros((len(q), heads, width), np.float32)
        for span, start, row in zip(spans, past, table, strict=True):
            total = start + len(span)
            mapped = row[: -(-total // block_tokens)]
            assert (mapped >= 0).all(), "a token that is attended to has no block"
            keys, values = (
                cache[mapped].reshape(-1, kv_heads, width)[:total].astype(np.float32)
                for cache in (key_cache, value_cache)
            )
            output[span.start : span.stop] = attend(
                q[span.start : span.stop],
                keys,
                values,
                scale=attributes.get("scale", 0.0) or width**-0.5,
                window=attributes.get("local_window_size", -1),
                softcap=attributes.get("softcap", 0.0),
            )
        return output.reshape(len(q), -1).astype(query.dtype), key_cache, value_cache


def attend(
    q: Float, keys: Float, values: Float, *, scale: float, window: int, softcap: float
) -> Float:
    """Causal attention of the last len(q) tokens: [S, heads, D], [T, kv_heads, D] twice.

    A token sees itself and, if `window` is positive, the window - 1 before it, else all.
    """
    group = q.shape[1] // keys.shape[1]
    wide_keys, wide_values = (
        np.repeat(part, group, axis=1).astype(np.float64) for part in (keys, values)
    )
    scores = np.einsum("shd,thd->hst", q, wide_keys) * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    own = np.arange(len(keys) - len(q), len(keys))[:, None]
    seen = np.arange(len(keys))[None] <= own
    if window > 0:
        seen &= np.arange(len(keys))[None] > own - window
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.asarray(np.einsum("hst,thd->shd", weights, wide_values), np.float32)


def rotated(x: Float, cos: Array, sin: Array) -> Float:
    """Channels i and i + cos.shape[1] of each head turned: x [N, heads, D], cos and sin [N, .]."""
    width = cos.shape[1]
    c, s = (part.astype(np.float32)[:, None] for part in (cos, sin))
    first, second, rest = np.split(x, [width, 2 * width], axis=-1)
    turned = [first * c - second * s, second * c + first * s, rest]
    return np.concatenate(turned, axis=-1)


def rms_norm(x: Array, gain: Array, epsilon: float) -> Float:
    """float32, over the last axis."""
    values = x.astype(np.float32)
    mean = np.square(values).mean(axis=-1, keepdims=True)
    return np.asarray(values / np.sqrt(mean + np.float32(epsilon)) * gain, np.float32)


class RMSNormalization(Operator):
    """Statistics in float32; the output has the type of the gain."""

    op_domain = ""

    def _run(self, x: Array, gain: Array, **attributes: Any) -> tuple[Array]:
        return (rms_norm(x, gain, attributes.get("epsilon", 1e-5)).astype(gain.dtype),)


class SkipSimplifiedLayerNormalization(Operator):
    """The norm of x + skip, and x + skip as the fourth output."""

    op_domain = MICROSOFT

    def _run(self, x: Array, skip: Array, gain: Array, **attributes: Any) -> tuple[Array, ...]:
        total = x.astype(np.float32) + skip
        normed = rms_norm(total, gain, attributes.get("epsilon", 1e-5))
        unused = np.zeros(0, np.float32)
        return normed.astype(x.dtype), unused, unused, total.astype(x.dtype)


class MatMul(Operator):
    op_domain = ""

    def _run(self, a: Array, b: Array, **_: Any) -> tuple[Array]:
        return (np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(a.dtype),)


class Gemm(Operator):
    """With its first operand as it is, alpha 1 and no addend."""

    op_domain = ""

    def _run(self, a: Array, b: Array, **attributes: Any) -> tuple[Array]:
        assert not attributes.get("transA", 0) and attributes.get("alpha", 1) == 1
        right = b.T if attributes.get("transB", 0) else b
        return ((a.astype(np.float64) @ right.astype(np.float64)).astype(a.dtype),)


class MatMulNBits(Operator):
    """x float [M, K] times blocks of codes, uint8 [N, blocks, block_size * bits / 8].

    weight = (code - zero point) * scale. A byte holds the code of lower index in its lower bits;
    zero points are packed likewise along blocks, or 2^(bits - 1) where there are none.
    """

    op_domain = MICROSOFT

    def _run(
        self, x: Array, codes: Array, scales: Array, zeros: Array | None = None, **attributes: Any
    ) -> tuple[Array]:
        bits, n, k = attributes["bits"], attributes["N"], attributes["K"]
        blocks = -(-k // attributes["block_size"])
        values = unpacked(codes.reshape(n, blocks, -1), bits)
        zero = np.full((n, blocks), 1 << (bits - 1), np.float32)
        if zeros is not None:
            zero = unpacked(zeros.reshape(n, -1), bits)[:, :blocks]
        by_block = (values - zero[:, :, None]) * scales.astype(np.float32).reshape(n, blocks, 1)
        weight = by_block.reshape(n, -1)[:, :k].astype(x.dtype)  # kernels multiply in x's type
        return ((x.astype(np.float64) @ weight.astype(np.float64).T).astype(x.dtype),)


class GatherBlockQuantized(Operator):
    """Rows of a matrix of 8-bit codes [rows, K] with zero point 128, scales [rows, blocks]."""

    op_domain = MICROSOFT

    def _run(self, codes: Array, ids: Array, scales: Array, **attributes: Any) -> tuple[Array]:
        assert attributes["bits"] == 8 and attributes["gather_axis"] == 0
        spread = np.repeat(scales[ids].astype(np.float32), attributes["block_size"], axis=-1)
        values = codes[ids].astype(np.float32) - 128
        return ((values * spread[..., : codes.shape[1]]).astype(scales.dtype),)


class QuickGelu(Operator):
    """x * sigmoid(alpha x)."""

    op_domain = MICROSOFT

    def _run(self, x: Array, **attributes: Any) -> tuple[Array]:
        values = x.astype(np.float32)
        with np.errstate(over="ignore"):
            gate = 1 / (1 + np.exp(-np.float32(attributes["alpha"]) * values))
        return ((values * gate).astype(x.dtype),)


def unpacked(codes: Array, bits: int) -> Float:
    """The codes in the bytes of the last axis, lower bits first."""
    per_byte = 8 // bits
    shifts = np.arange(per_byte, dtype=np.uint8) * bits
    parts = (codes[..., None] >> shifts) & ((1 << bits) - 1)
    return np.asarray(parts.reshape(*codes.shape[:-1], -1), np.float32)


OPERATORS = (
    PagedAttention,
    RMSNormalization,
    SkipSimplifiedLayerNormalization,
    MatMul,
    Gemm,
    MatMulNBits,
    GatherBlockQuantized,
    QuickGelu,
)
