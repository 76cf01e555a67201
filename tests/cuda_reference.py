"""What a CUDA target should say: the same weights, rounded the same way, in float32 on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from headrace.exporters.checkpoint.source import open_checkpoint
from headrace.exporters.graph.decoder import build_decoder
from headrace.exporters.graph.linear import BlockFormat, Float32, LinearFormat
from headrace.exporters.graph.weights import WeightStore
from headrace.exporters.model import checked_spec, decoder_parts
from headrace.exporters.precision import find_precision
from headrace.exporters.validate import GraphRunner

Float = NDArray[np.float32]
_BITS = {"cuda_w8": 8, "cuda_w4": 4}


class Reference:
    """Runs texts one after the other.

    Args:
        source: the checkpoint.
        target: one of `CUDA_TARGETS`.
        folder: an empty one for graph and weights.
    """

    def __init__(self, source: Path, target: str, folder: Path, capacity_tokens: int) -> None:
        folder.mkdir(parents=True)
        fmt: LinearFormat = Float32()
        if (bits := _BITS.get(target)) is not None:
            fmt = BlockFormat("reference", bits, accuracy_level=1)
        with open_checkpoint(source) as checkpoint, WeightStore(folder, "weights.bin") as store:
            spec = checked_spec(checkpoint)
            parts = decoder_parts(spec, checkpoint.tensors, find_precision("fp32"))
            parts = dataclasses.replace(parts, layer_format=fmt, head_format=fmt)
            ir.save(build_decoder(parts, store, "uniform"), folder / "reference.onnx")
        self._runner = GraphRunner(folder / "reference.onnx", capacity_tokens)

    def logits(self, text: Sequence[int]) -> Float:
        """float32 [T, vocab]."""
        self._runner.reset()
        return self._runner.run(list(text))

    def greedy(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
        """The likeliest continuation."""
        self._runner.reset()
        text = list(prompt)
        last = text
        for _ in range(new_tokens):
            last = [int(self._runner.run(last, last_only=True)[0].argmax())]
            text += last
        return text[len(prompt) :]
