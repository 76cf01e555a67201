"""What calibration text shows: scales of a quantized KV cache, Gram matrices, and fidelity.

Keys (after rotation) and values are quantized with static symmetric scales, one for each layer, KV
head and channel: 1.1 x absmax / 127 over about 4,600 tokens of prose and some conversations. The
margin matters: clipping hurts more than coarseness. With 4 bits it is the other way round, and each
scale is the one of least error. The gate compares, on text that was not calibrated on, a quantized
with a float32 cache of the same weights.

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
from numpy.typing import NDArray
from tokenizers import Tokenizer

from headrace.exporters.archs.spec import DecoderSpec
from headrace.exporters.capture import CapturingFormat, Grams, collect_grams
from headrace.exporters.graph.attention import KvScales
from headrace.exporters.graph.decoder import DecoderParts, build_decoder
from headrace.exporters.graph.linear import BlockFormat, Float32, LinearFormat, Weight
from headrace.exporters.graph.weights import WeightStore
from headrace.exporters.validate import GraphRunner
from headrace.runtime.chat.template import render_chat
from headrace.runtime.errors import ExportError
from headrace.runtime.fidelity import Fidelity, FidelityMeter, spread_chunks

KV_GATE_NATS = 0.005
_MARGIN = np.float32(1.1)
_CHUNK_TOKENS = 512
_NUM_CHUNKS = 12
_HELD_OUT_EVERY = 4  # pairs of chunks, one of them kept to judge on
_HELD_OUT_TOKENS = 256
_MAX_FLOAT32_BYTES = 2**32
_STEP_TOKENS = 128
_SAMPLE_EVERY = 4  # tokens whose keys and values are kept to find INT4 scales with
_SHRINKS = (1.1, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)

Float = NDArray[np.float32]


@dataclasses.dataclass(frozen=True, slots=True)
class CalibrationChunks:
    """Token ids to calibrate on, and others, in shorter pieces, to judge the result on."""

    seen: list[list[int]]
    held_out: list[list[int]]


def calibration_chunks(
    tokenizer: Tokenizer,
    chat_template: str | None,
    spec: DecoderSpec,
    text: str | None = None,
    *,
    bos_token_id: int | None = None,
) -> CalibrationChunks:
    """The calibration texts: prose in chunks of at most 512 tokens, and conversations.

    Conversations are rendered with the model's own template: the tokens that frame its turns have
    keys and values that no prose shows. `text` takes the place of the prose that comes with
    headrace. `bos_token_id` begins every chunk of prose, for models that never see a text without.

    Raises:
        ExportError: the text is too short.
    """
    folder = resources.files("headrace.exporters") / "data"
    if text is None:
        text = (folder / "calibration_wikitext.txt").read_text(encoding="utf-8")
    size = min(_CHUNK_TOKENS, spec.context_tokens)
    ids = _encode(tokenizer, text, spec.vocab_size)
    prose = spread_chunks(ids, _NUM_CHUNKS, size)
    if len(prose) < _NUM_CHUNKS // 2:
        raise ExportError(
            f"the calibration text makes {len(ids)} tokens, {size * _NUM_CHUNKS // 2} are needed"
        )
    # Prose and conversations alternate, so pairs are kept out together.
    begin = [] if bos_token_id is None else [bos_token_id]
    pairs = [[(begin + chunk)[:size]] for chunk in prose]
    if chat_template is not None:
        conversations = json.loads((folder / "calibration_chat.json").read_text(encoding="utf-8"))
        for pair, chat in zip(pairs, conversations, strict=False):
            pair.append(_chat_ids(tokenizer, chat_template, chat, spec)[:size])
    last = _HELD_OUT_EVERY - 1
    return CalibrationChunks(
        [c for i, pair in enumerate(pairs) for c in pair if i % _HELD_OUT_EVERY != last],
        [
            c[:_HELD_OUT_TOKENS]
            for i, pair in enumerate(pairs)
            for c in pair
            if i % _HELD_OUT_EVERY == last
        ],
    )


def _chat_ids(
    tokenizer: Tokenizer, template: str, messages: list[dict[str, str]], spec: DecoderSpec
) -> list[int]:
    segments = render_chat(template, messages, add_generation_prompt=False)
    return _encode(tokenizer, "".join(text for text, _ in segments), spec.vocab_size)


def _encode(tokenizer: Tokenizer, text: str, vocab_size: int) -> list[int]:
    """Token ids; a tokenizer may know more than the embedding, which are left out."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return [i for i in ids if i < vocab_size]


@dataclasses.dataclass(frozen=True, slots=True)
class Calibration:
    """What calibration text showed.

    Attributes:
        kv_scales: of the quantized cache; `kv_fidelity` is what that cache costs.
        grams: of the inputs of all linear layers, or None where they were not wanted.
        reference: the float32-activation graph that was measured.
    """

    kv_scales: KvScales | None
    kv_fidelity: Fidelity | None
    grams: Grams | None
    reference: Path


def calibrate(
    parts: DecoderParts,
    chunks: CalibrationChunks,
    folder: Path,
    *,
    kv_bits: int | None,
    grams: bool,
    advance: Callable[[], None] = lambda: None,
) -> Calibration:
    """Measure cache scales and what they cost, and Gram matrices.

    Args:
        folder: takes graphs, a weight file and matrices; the result refers to them.
        kv_bits: of the cache, 8 or 4, or None for no scales.
        advance: called once a chunk and pass over it.
    """
    fmt = calibration_format(parts.spec)
    plain = dataclasses.replace(parts, layer_format=fmt, head_format=fmt, kv_scales=None)
    reference = folder / "float.onnx"
    peaks: list[np.ndarray] = []
    samples: list[np.ndarray] = []

    def on_chunk(runner: GraphRunner | None) -> None:
        if runner is not None and kv_bits is not None:
            cache = np.stack(runner.cache())  # [2, layers, kv_heads, tokens, head_dim]
            peaks.append(np.abs(cache).max(axis=3))
            samples.append(cache[:, :, :, ::_SAMPLE_EVERY].astype(np.float16))
        advance()

    with WeightStore(folder, "calibration.bin") as store:
        ir.save(build_decoder(plain, store, "uniform"), reference)
        store.flush()

        def build(capturing: CapturingFormat) -> ir.Model:
            formats = dataclasses.replace(plain, layer_format=capturing, head_format=capturing)
            return build_decoder(formats, store, "uniform")

        collected = None
        if grams:
            collected = collect_grams(build, fmt, chunks.seen, folder, on_chunk)
        elif kv_bits is not None:
            runner = GraphRunner(reference, max(map(len, chunks.seen)))
            for chunk in chunks.seen:
                runner.reset()
                runner.append(chunk, last_only=True)
                on_chunk(runner)
            del runner
        if kv_bits is None:
            return Calibration(None, None, collected, reference)
        peak = np.maximum(np.max(peaks, axis=0), 1e-6)
        if kv_bits == 8:
            key, value = peak * _MARGIN / np.float32(127)
        else:
            key, value = least_error_scales(peak, np.concatenate(samples, axis=3))
        scales = KvScales(key.astype(np.float32), value.astype(np.float32), kv_bits)
        quantized = dataclasses.replace(plain, kv_scales=scales)
        ir.save(build_decoder(quantized, store, "uniform"), folder / "cache.onnx")
    fidelity = compare_graphs(reference, folder / "cache.onnx", chunks.held_out, advance)
    return Calibration(scales, fidelity, collected, reference)


def least_error_scales(peak: Float, sample: NDArray[np.float16]) -> Float:
    """INT4 scales, each the one of `_SHRINKS` x peak / 7 with the least squared error.

    peak float32 [2, layers, kv_heads, head_dim]; sample [2, layers, kv_heads, tokens, head_dim].
    """
    best = peak / np.float32(7)
    least = np.full(peak.shape, np.inf, np.float32)
    for shrink in _SHRINKS:
        scales = peak * np.float32(shrink / 7)
        for i, part in enumerate(sample):  # keys, then values: half of the memory
            values = part.astype(np.float32)
            step = scales[i, :, :, None]
            codes = np.clip(np.rint(values / step), -8, 7)
            error = np.square(values - codes * step).sum(axis=2)
            better = error < least[i]
            least[i] = np.where(better, error, least[i])
            best[i] = np.where(better, scales[i], best[i])
    return best


def compare_graphs(
    reference: Path,
    graph: Path,
    chunks: Sequence[Sequence[int]],
    advance: Callable[[], None] = lambda: None,
) -> Fidelity:
    """Run both graphs over the same text."""
    capacity = max(map(len, chunks)) + _STEP_TOKENS
    runners = [GraphRunner(path, capacity) for path in (reference, graph)]
    meter = FidelityMeter()
    for chunk in chunks:
        for runner in runners:
            runner.reset()
        for start in range(0, len(chunk), _STEP_TOKENS):
            step = list(chunk[start : start + _STEP_TOKENS])
            expected, actual = (runner.run(step) for runner in runners)
            meter.add(expected, actual, chunk[start + 1 : start + 1 + len(step)])
        advance()
    return meter.result()


def with_grams(parts: DecoderParts, grams: Grams) -> DecoderParts:
    """The same model, with what each weight is multiplied with."""

    def weight(*names: str) -> Weight:
        plain = parts.weight(*names)
        return dataclasses.replace(plain, gram=lambda: grams.load(names[0]))

    return dataclasses.replace(parts, weight=weight)


def calibration_format(spec: DecoderSpec) -> LinearFormat:
    """Float32 activations, and weights that fit into memory."""
    small = 4 * _num_weights(spec) <= _MAX_FLOAT32_BYTES
    return Float32() if small else BlockFormat("calibration", 8, accuracy_level=1)


def _num_weights(spec: DecoderSpec) -> int:
    """Matrix elements, about."""
    heads = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    layer = spec.hidden_size * (heads + 3 * spec.intermediate_size)
    return spec.num_layers * layer + spec.vocab_size * spec.hidden_size
