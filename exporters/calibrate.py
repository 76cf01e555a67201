"""Scales of the INT8 KV cache, and the gate that decides whether it may be used.

Keys (after rotation) and values are quantized with static symmetric scales, one for each layer, KV
head and channel: 1.1 x absmax / 127 over 4,096 tokens of prose and some conversations. The margin
matters: clipping hurts more than coarseness. The gate compares, on text that was not calibrated on,
an INT8 with a float32 cache of the same weights.

Both are measured with float32 activations: dynamic activation rounding would amplify differences of
1e-7 into as much as the cache itself costs. Weights are float32 too, or, where those would take too
much memory, 8-bit blocks with `accuracy_level` 1, four times slower.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

import numpy as np
import onnx_ir as ir
from tokenizers import Tokenizer

from headrace.exporters.archs.spec import DecoderSpec
from headrace.exporters.graph.decoder import DecoderParts, KvScales, build_decoder
from headrace.exporters.graph.linear import BlockFormat, Float32
from headrace.exporters.graph.weights import WeightStore
from headrace.exporters.validate import Fidelity, FidelityMeter, GraphRunner
from headrace.runtime.chat import render_chat
from headrace.runtime.errors import ExportError

KV_GATE_NATS = 0.005
_MARGIN = np.float32(1.1)
_CHUNK_TOKENS = 512
_NUM_CHUNKS = 12
_HELD_OUT_EVERY = 4  # chunks kept for the gate
_MAX_FLOAT32_BYTES = 2**32
_STEP_TOKENS = 128


def calibration_chunks(
    tokenizer: Tokenizer, chat_template: str | None, spec: DecoderSpec
) -> list[list[int]]:
    """Token ids of the calibration texts: prose in chunks of at most 512, and conversations.

    Conversations are rendered with the model's own template: the tokens that frame its turns have
    keys and values that no prose shows.
    """
    folder = resources.files("headrace.exporters") / "data"
    text = (folder / "calibration_wikitext.txt").read_text(encoding="utf-8")
    size = min(_CHUNK_TOKENS, spec.context_tokens)
    ids = _encode(tokenizer, text, spec.vocab_size)
    prose = [ids[i : i + size] for i in range(0, len(ids), size)][:_NUM_CHUNKS]
    if len(prose) < _NUM_CHUNKS // 2:
        raise ExportError("the tokenizer makes too few tokens of the calibration text")
    if chat_template is None:
        return prose
    conversations = json.loads((folder / "calibration_chat.json").read_text(encoding="utf-8"))
    chats = [_chat_ids(tokenizer, chat_template, chat, spec)[:size] for chat in conversations]
    # Interleaved, so that what is held out for the gate has both.
    return [chunk for pair in zip(prose, chats, strict=False) for chunk in pair]


def _chat_ids(
    tokenizer: Tokenizer, template: str, messages: list[dict[str, str]], spec: DecoderSpec
) -> list[int]:
    segments = render_chat(template, messages, add_generation_prompt=False)
    return _encode(tokenizer, "".join(text for text, _ in segments), spec.vocab_size)


def _encode(tokenizer: Tokenizer, text: str, vocab_size: int) -> list[int]:
    """Token ids; a tokenizer may know more than the embedding, which are left out."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return [i for i in ids if i < vocab_size]


def calibrate_kv(
    parts: DecoderParts,
    chunks: Sequence[Sequence[int]],
    folder: Path,
    advance: Callable[[], None] = lambda: None,
) -> tuple[KvScales, Fidelity]:
    """Measure scales and what they cost; `folder` takes temporary graphs.

    `advance` is called once a chunk.
    """
    small = 4 * _num_weights(parts.spec) <= _MAX_FLOAT32_BYTES
    fmt = Float32() if small else BlockFormat("calibration", 8, accuracy_level=1)
    plain = dataclasses.replace(parts, layer_format=fmt, head_format=fmt, kv_scales=None)
    capacity = max(len(chunk) for chunk in chunks) + _STEP_TOKENS
    held_out = [c for i, c in enumerate(chunks) if _is_held_out(i)]
    with WeightStore(folder, "calibration.bin") as store:
        ir.save(build_decoder(plain, store, "uniform"), folder / "float.onnx")
        store.flush()
        reference = GraphRunner(folder / "float.onnx", capacity)
        seen = [c for i, c in enumerate(chunks) if not _is_held_out(i)]
        scales = _absmax_scales(reference, seen, advance)
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
            runner.run(step, last_only=True)
        # [2, layers, kv_heads, head_dim]
        peaks.append(np.stack([np.abs(part).max(axis=2) for part in runner.cache()]))
        advance()
    key, value = np.maximum(np.max(peaks, axis=0), 1e-6) * _MARGIN / np.float32(127)
    return KvScales(key.astype(np.float32), value.astype(np.float32))


def _is_held_out(index: int) -> bool:
    """Prose and conversations alternate, so pairs are kept out together."""
    return index // 2 % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1


def _num_weights(spec: DecoderSpec) -> int:
    """Matrix elements, about."""
    heads = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    layer = spec.hidden_size * (heads + 3 * spec.intermediate_size)
    return spec.num_layers * layer + spec.vocab_size * spec.hidden_size


def _steps(chunk: Sequence[int]) -> list[list[int]]:
    return [list(chunk[i : i + _STEP_TOKENS]) for i in range(0, len(chunk), _STEP_TOKENS)]
