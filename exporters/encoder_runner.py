"""Run an exported encoder the plain way, one text a call: the slow twin of
`backends.cpu_avx512.encoder`. Checks a graph before a package is finished and measures it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.backends.ort_import import load_onnxruntime
from headrace.runtime.encoder import manifest as io
from headrace.runtime.encoder.manifest import PoolingInfo
from headrace.runtime.encoder.pooling import normalized, pool
from headrace.runtime.errors import ExportError

Float = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class CosineFidelity:
    """Cosines between a package's vectors and the FP32 graph's, over `num_texts` texts."""

    num_texts: int
    mean_cosine: float
    min_cosine: float


def encode_plainly(graph: Path, texts: Sequence[Sequence[int]], pooling: PoolingInfo) -> Float:
    """Vectors float32 [len(texts), hidden] of texts given as token ids.

    Raises:
        ExportError: the graph does not run, or gives what is not finite.
    """
    ort = load_onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = 3
    # Without AVX-512 VNNI the integer GEMM saturates unless it is told not to.
    options.add_session_config_entry("session.x64quantprecision", "1")
    try:
        session = ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        wanted = {value.name for value in session.get_inputs()}
        states = [session.run([io.STATES], _feeds(ids, wanted))[0] for ids in texts]
    except Exception as error:  # any failure of a graph that we made is ours to report
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ExportError(f"the exported graph does not run: {reason}") from error
    vectors = np.concatenate([pool(s, [len(s)], pooling.mode) for s in states])
    if not np.isfinite(vectors).all():
        raise ExportError("the exported graph gives states that are not finite")
    return normalized(vectors) if pooling.normalize else vectors


def compare_vectors(reference: Float, vectors: Float) -> CosineFidelity:
    """How far vectors, [n, hidden], are from those of the FP32 graph."""
    cosines = (normalized(reference) * normalized(vectors)).sum(axis=1)
    return CosineFidelity(len(cosines), float(cosines.mean()), float(cosines.min()))


def _feeds(ids: Sequence[int], wanted: set[str]) -> dict[str, NDArray[np.int64]]:
    span = np.arange(len(ids), dtype=np.int64)
    feeds = {
        io.INPUT_IDS: np.array(ids, np.int64),
        io.POSITION_IDS: span,
        io.GATHER_INDEX: span[None],
        io.SCATTER_INDEX: span,
        io.LENGTHS: np.array([len(ids)], np.int64),
        io.FIRST_TOKENS: span[:1],
    }
    return {name: value for name, value in feeds.items() if name in wanted}
