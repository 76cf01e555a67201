"""Scales of the INT8 KV cache, and the gate that decides whether it may be used.

Keys (after rotation) and values are quantized with static symmetric scales, one for each layer, KV
head and channel: 1.1 x absmax / 127 over 4,096 tokens of text. The margin matters: clipping hurts
more than coarseness. The gate compares, on text that was not calibrated on, an INT8 with a float32
cache of the same weights.

Both are measured with 8-bit block weights and float32 activations (`accuracy_level` 1): dynamic
activation rounding would amplify differences of 1e-7 into as much as the cache itself costs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

import numpy as np
import onnx_ir as ir
from tokenizers import Tokenizer

from headrace.exporters.graph.decoder import DecoderParts, KvScales, build_decoder
from headrace.exporters.graph.linear import BlockFormat
from headrace.exporters.graph.weights import WeightStore
from headrace.exporters.validate import Fidelity, FidelityMeter, GraphRunner
from headrace.runtime.errors import ExportError

KV_GATE_NATS = 0.005
_MARGIN = np.float32(1.1)
_CHUNK_TOKENS = 512
_NUM_CHUNKS = 12  # every third is kept for the gate
_STEP_TOKENS = 128


def calibration_chunks(tokenizer: Tokenizer, context_tokens: int) -> list[list[int]]:
    """Token ids of the calibration text, in chunks of at most 512."""
    folder = resources.files("headrace.exporters") / "data"
    text = (folder / "calibration_wikitext.txt").read_text(encoding="utf-8")
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    size = min(_CHUNK_TOKENS, context_tokens)
    chunks = [ids[i : i + size] for i in range(0, len(ids), size)][:_NUM_CHUNKS]
    if len(chunks) < 3:
        raise ExportError("the tokenizer makes too few tokens of the calibration text")
    return chunks


def calibrate_kv(
    parts: DecoderParts,
    chunks: Sequence[Sequence[int]],
    folder: Path,
    advance: Callable[[], None] = lambda: None,
) -> tuple[KvScales, Fidelity]:
    """Measure scales and what they cost; `folder` takes temporary graphs.

    `advance` is called once a chunk.
    """
    block = BlockFormat("calibration", 8, accuracy_level=1)
    plain = dataclasses.replace(parts, layer_format=block, head_format=block, kv_scales=None)
    capacity = max(len(chunk) for chunk in chunks) + _STEP_TOKENS
    held_out = [chunk for i, chunk in enumerate(chunks) if i % 3 == 2]
    with WeightStore(folder, "calibration.bin") as store:
        ir.save(build_decoder(plain, store, "uniform"), folder / "float.onnx")
        store.flush()
        reference = GraphRunner(folder / "float.onnx", capacity)
        scales = _absmax_scales(reference, [c for i, c in enumerate(chunks) if i % 3 != 2], advance)
        quantized = dataclasses.replace(plain, kv_scales=scales)
        ir.save(build_decoder(quantized, store, "uniform"), folder / "int8.onnx")
    model = GraphRunner(folder / "int8.onnx", capacity)
    meter = FidelityMeter()
    for chunk in held_out:
        reference.reset()
        model.reset()
        for step in _steps(chunk):
            meter.add(reference.run(step), model.run(step))
        advance()
    return scales, meter.result()


def _absmax_scales(
    runner: GraphRunner, chunks: Sequence[Sequence[int]], advance: Callable[[], None]
) -> KvScales:
    peaks: list[np.ndarray] = []
    for chunk in chunks:
        runner.reset()
        for step in _steps(chunk):
            runner.run(step)
        # [2, layers, kv_heads, head_dim]
        peaks.append(np.stack([np.abs(part).max(axis=2) for part in runner.cache()]))
        advance()
    key, value = np.maximum(np.max(peaks, axis=0), 1e-6) * _MARGIN / np.float32(127)
    return KvScales(key.astype(np.float32), value.astype(np.float32))


def _steps(chunk: Sequence[int]) -> list[list[int]]:
    return [list(chunk[i : i + _STEP_TOKENS]) for i in range(0, len(chunk), _STEP_TOKENS)]
