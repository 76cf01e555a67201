"""Run an exported graph the plain way: one sequence, fresh arrays, no binding, no packing tricks.

Used to check a graph before a package is finished and to measure fidelity; the slow twin of
`backends.cpu_avx512`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backends.ort_import import load_onnxruntime
from headrace.runtime import manifest as io
from headrace.runtime.errors import ExportError

Float = NDArray[np.float32]
_CACHE_TYPES: dict[str, type[np.generic]] = {
    "tensor(float)": np.float32,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
}


class GraphRunner:
    """One sequence on a graph of any form.

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
                shape = (1, info.shape[1], self._capacity, info.shape[3])
                self._cache[name] = np.zeros(shape, _CACHE_TYPES[info.type])

    def run(self, token_ids: list[int], *, last_only: bool = False) -> Float:
        """Append tokens; logits float32 [len(token_ids), vocab], or [1, vocab] of the last."""
        return self.run_with_entropy(token_ids, last_only=last_only)[0]

    def run_with_entropy(
        self, token_ids: list[int], *, last_only: bool = False
    ) -> tuple[Float, Float]:
        """As `run`, with the entropy of each row in nats."""
        results = self.append(token_ids, last_only=last_only)
        return results[io.LOGITS], results[io.ENTROPY]

    def append(
        self,
        token_ids: list[int],
        more_feeds: Mapping[str, NDArray[Any]] | None = None,
        *,
        last_only: bool = False,
    ) -> dict[str, NDArray[Any]]:
        """Append tokens; everything that the graph gives, by name."""
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
            io.POSITION_IDS: self._past + span[None],
            io.ATTENTION_BIAS: np.zeros((1, 1, n, self._capacity), np.float32),
            **self._cache,
            **(more_feeds or {}),
        }
        values = self._session.run(
            self._outputs, {name: value for name, value in feeds.items() if name in self._inputs}
        )
        results = dict(zip(self._outputs, values, strict=True))
        for name in self._cache:
            # A graph that was cut down for measuring may keep no cache.
            present = name.replace("past_", "present_", 1)
            self._cache[name] = results.get(present, self._cache[name])
        self._past += n
        return results

    def cache(self) -> tuple[Float, Float]:
        """Keys and values so far, [layers, kv_heads, tokens, head_dim] each."""
        layers = len(self._cache) // 2
        keys, values = (
            np.stack([self._cache[n.format(i)][0, :, : self._past] for i in range(layers)])
            for n in (io.PAST_KEY, io.PAST_VALUE)
        )
        return keys, values


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
