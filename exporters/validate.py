"""Run an exported graph the plain way: one sequence, fresh arrays, no binding, no packing tricks.

Used to check a graph before a package is finished and to measure fidelity; the slow twin of
`backends.cpu_avx512`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backends.ort_import import load_onnxruntime
from headrace.runtime import manifest as io
from headrace.runtime.errors import ExportError

Float = NDArray[np.float32]


class GraphRunner:
    """One sequence on a "ragged" or "uniform" graph.

    Args:
        graph: the .onnx file.
        capacity_tokens: room in the cache; the sequence and its longest run must fit.
    """

    def __init__(self, graph: Path, capacity_tokens: int, num_threads: int = 0) -> None:
        ort = load_onnxruntime()
        options = ort.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.log_severity_level = 3
        # Without AVX-512 VNNI the integer GEMM saturates unless it is told not to.
        options.add_session_config_entry("session.x64quantprecision", "1")
        self._session = ort.InferenceSession(
            str(graph), options, providers=["CPUExecutionProvider"]
        )
        self._inputs = {i.name: i for i in self._session.get_inputs()}
        self._outputs = [o.name for o in self._session.get_outputs()]
        self._capacity = capacity_tokens
        self.reset()

    def reset(self) -> None:
        """Forget the sequence."""
        self._past = 0
        self._cache: dict[str, NDArray[Any]] = {}
        for name, info in self._inputs.items():
            if name.startswith("past_"):
                dtype = np.int8 if info.type == "tensor(int8)" else np.float32
                shape = (1, info.shape[1], self._capacity, info.shape[3])
                self._cache[name] = np.zeros(shape, dtype)

    def run(self, token_ids: list[int], *, last_only: bool = False) -> Float:
        """Append tokens; logits float32 [len(token_ids), vocab], or [1, vocab] of the last."""
        return self.run_with_entropy(token_ids, last_only=last_only)[0]

    def run_with_entropy(
        self, token_ids: list[int], *, last_only: bool = False
    ) -> tuple[Float, Float]:
        """As `run`, with the entropy of each row in nats."""
        n = len(token_ids)
        span = np.arange(n, dtype=np.int64)
        feeds: dict[str, NDArray[Any]] = {
            io.INPUT_IDS: np.array(token_ids, np.int64),
            io.GATHER_INDEX: span[None],
            io.SCATTER_INDEX: span,
            io.SEQLENS_K: np.array([self._past + n - 1], np.int32),
            io.TOTAL_TOKENS: np.array(self._capacity, np.int32),
            io.QUERY_SEQLENS: np.array([n], np.int32),
            io.LOGITS_INDEX: span[-1:] if last_only else span,
            io.INVERSE_TEMPERATURE: np.zeros((1 if last_only else n, 1), np.float32),
            **self._cache,
        }
        values = self._session.run(
            self._outputs, {name: value for name, value in feeds.items() if name in self._inputs}
        )
        results = dict(zip(self._outputs, values, strict=True))
        for name in self._cache:
            self._cache[name] = results[name.replace("past_", "present_", 1)]
        self._past += n
        return results[io.LOGITS], results[io.ENTROPY]

    def cache(self) -> tuple[Float, Float]:
        """Keys and values so far, [layers, kv_heads, tokens, head_dim] each."""
        layers = len(self._cache) // 2
        keys, values = (
            np.stack([self._cache[n.format(i)][0, :, : self._past] for i in range(layers)])
            for n in (io.PAST_KEY, io.PAST_VALUE)
        )
        return keys, values


@dataclass(frozen=True, slots=True)
class Fidelity:
    """How far a model's next-token distributions are from a reference's, over `num_tokens`.

    KL divergence D(reference || model) in nats; `top1_agreement` is the share of equal argmaxes.
    """

    num_tokens: int
    mean_kl_nats: float
    p99_kl_nats: float
    top1_agreement: float


class FidelityMeter:
    """Collects rows of logits of two models."""

    def __init__(self) -> None:
        self._kl: list[NDArray[np.float64]] = []
        self._same = 0

    def add(self, reference: Float, model: Float) -> None:
        """Two arrays of logits, float32 [rows, vocab]."""
        p, q = _log_softmax(reference), _log_softmax(model)
        self._kl.append((np.exp(p) * (p - q)).sum(axis=1, dtype=np.float64))
        self._same += int((reference.argmax(axis=1) == model.argmax(axis=1)).sum())

    def result(self) -> Fidelity:
        kl = np.concatenate(self._kl)
        return Fidelity(
            len(kl), float(kl.mean()), float(np.quantile(kl, 0.99)), self._same / len(kl)
        )


def check_graph(graph: Path, vocab_size: int) -> None:
    """Run one token through the graph.

    Raises:
        ExportError: it does not load or its logits are not finite.
    """
    try:
        logits = GraphRunner(graph, capacity_tokens=64).run([0])
    except Exception as error:  # any failure of a graph that we made is ours to report
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ExportError(f"the exported graph does not run: {reason}") from error
    if logits.shape != (1, vocab_size) or not np.isfinite(logits).all():
        raise ExportError("the exported graph gives logits that are not finite")


def _log_softmax(logits: Float) -> Float:
    shifted: Float = logits - logits.max(axis=1, keepdims=True)
    total = np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)
    result: Float = shifted - np.log(total).astype(np.float32)
    return result
