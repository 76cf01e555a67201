"""The CUDA backend: one ONNX Runtime session, a pool of KV blocks, packed steps.

What only a card can run is in `provider.py` and `device.py`; the rest is driven in tests through a
session that computes graphs in numpy. Nothing here has ever run on a card.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Capabilities, StepOutput
from headrace.backends.cuda.blocks import BlockPool
from headrace.backends.cuda.device import CudaDevice, Device
from headrace.backends.cuda.kv_storage import KvStorage
from headrace.backends.cuda.layout import step_feeds
from headrace.backends.cuda.provider import cuda_session
from headrace.backends.kv_ops import apply_kv_ops, kv_identity
from headrace.backends.ort_import import load_onnxruntime
from headrace.backends.ort_session import map_ort_errors
from headrace.backends.targets import choose_target
from headrace.runtime import manifest as io
from headrace.runtime.config import EngineConfig
from headrace.runtime.core import Row, StepPlan
from headrace.runtime.errors import BackendError, ConfigError, InsufficientMemoryError, PackageError
from headrace.runtime.machine.hardware import HardwareInfo
from headrace.runtime.manifest import MAX_ROW_TOKENS, Manifest, TargetInfo

_FORM = "paged"
# Of the memory left beside the weights; the rest is for activations of a step.
_KV_SHARE = 0.8
# Logits rows that are kept ready, a sequence: its next token and drafts.
_LOGITS_PER_SLOT = 16


@dataclass(frozen=True, slots=True)
class Connection:
    """A loaded graph and the device that it runs on."""

    session: Any
    device: Device


def connect_cuda(graph: Path) -> Connection:
    """Raises BackendUnavailableError: CUDA cannot be used here; says what is missing."""
    return Connection(cuda_session(graph), CudaDevice())


class CudaBackend:
    """See `backends.base.Backend` for the contract of the four methods.

    Args:
        connect: loads a graph; tests give another.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        config: EngineConfig,
        hardware: HardwareInfo,
        connect: Callable[[Path], Connection] = connect_cuda,
    ) -> None:
        self._folder, self._manifest, self._config = folder, manifest, config
        self._connect = connect
        self._session: Any = None
        self._binding: Any = None
        self._kv: KvStorage | None = None
        self._logits = np.empty((0, 0), np.float32)
        self._next_ticket = 0
        self._results: dict[int, StepOutput] = {}

    def load(self) -> Capabilities:
        target = self._choose_target()
        (graph,) = (g for g in target.graphs if g.form == _FORM)
        connection = self._connect(io.package_path(self._folder, graph.file))
        model, config = self._manifest.model, self._config
        context = min(model.context_tokens, config.context_tokens or model.context_tokens)
        slots = config.max_sequences
        block_tokens = target.kv_cache.block_tokens
        assert block_tokens is not None
        num_blocks = self._num_blocks(target, context, block_tokens, connection.device)
        self._session = connection.session
        self._inputs = frozenset(graph.inputs)
        self._kv = KvStorage(
            connection.device,
            BlockPool(num_blocks, block_tokens, slots),
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
        )
        self._binding = self._bind_cache(self._kv, connection.device.name)
        shape = (slots * _LOGITS_PER_SLOT, model.vocab_size)
        room = connection.device.host_array(shape[0] * shape[1] * 4)
        self._logits = room.view(np.float32).reshape(shape)
        return Capabilities(
            name=f"cuda ({target.name})",
            vocab_size=model.vocab_size,
            context_tokens=context,
            max_slots=slots,
            max_row_tokens=min(config.max_chunk_tokens, MAX_ROW_TOKENS, context),
            kv_bytes_per_token=target.kv_cache.bytes_per_token,
            # Two blocks of each slot may be partly empty: its last, and one that drafts reached.
            kv_budget_tokens=min((num_blocks - 2 * slots) * block_tokens, context * slots),
            kv_identity=kv_identity(self._folder, target),
            exact_rows=False,  # kernels are chosen by the number of rows
        )

    def submit(self, plan: StepPlan) -> int:
        if self._kv is None:
            raise BackendError("the backend is not loaded or was closed")
        kv = self._kv
        reads = apply_kv_ops(kv, plan.kv_ops)
        for row in plan.rows:
            kv.copy_blocks(kv.pool.write(row.slot, row.past_len, len(row.tokens)))
        logits, entropy, model_ms = self._run(plan.rows, kv)
        self._next_ticket += 1
        n = plan.num_logits
        self._results[self._next_ticket] = StepOutput(
            logits[:n], entropy[:n], model_ms, kv_reads=reads
        )
        return self._next_ticket

    def collect(self, ticket: int) -> StepOutput:
        return self._results.pop(ticket)

    def close(self) -> None:
        self._results.clear()
        self._binding = self._session = None  # before the memory that they have bound
        self._logits = np.empty((0, 0), np.float32)
        if self._kv is not None:
            self._kv.close()
        self._kv = None

    def _run(
        self, rows: Sequence[Row], kv: KvStorage
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], float]:
        """Logits [R, vocab], entropy [R] and wall time; R is at least what the rows ask for."""
        vocab_size = self._manifest.model.vocab_size
        if not rows:
            return np.empty((0, vocab_size), np.float32), np.empty(0, np.float32), 0.0
        value = load_onnxruntime().OrtValue.ortvalue_from_numpy
        feeds = step_feeds(rows, kv.pool)
        num_logits = len(feeds[io.LOGITS_INDEX])
        logits = self._logits[:num_logits]
        if num_logits > len(self._logits):
            logits = np.empty((num_logits, vocab_size), np.float32)
        entropy = np.empty(num_logits, np.float32)
        # These share memory with the arrays, which stay alive until the run is over.
        given = {name: value(feeds[name]) for name in self._inputs}
        for name, tensor in given.items():
            self._binding.bind_ortvalue_input(name, tensor)
        results = {io.LOGITS: value(logits), io.ENTROPY: value(entropy)}
        for name, tensor in results.items():
            self._binding.bind_ortvalue_output(name, tensor)
        start = time.perf_counter()
        with map_ort_errors("running a step"):
            self._session.run_with_iobinding(self._binding)
        return logits, entropy, (time.perf_counter() - start) * 1e3

    def _bind_cache(self, kv: KvStorage, device: str) -> Any:
        """A binding with the cache on both sides, so that it is changed in place."""
        binding = self._session.io_binding()
        for i, address in enumerate(kv.addresses):
            past, present = (
                (io.PAST_VALUE, io.PRESENT_VALUE) if i % 2 else (io.PAST_KEY, io.PRESENT_KEY)
            )
            place = (device, 0, np.float16, kv.shape, address)
            binding.bind_input(past.format(i // 2), *place)
            binding.bind_output(present.format(i // 2), *place)
        return binding

    def _num_blocks(
        self, target: TargetInfo, context: int, block_tokens: int, device: Device
    ) -> int:
        """As many as the budget holds and full slots can use.

        Raises:
            InsufficientMemoryError: there is no room for one block beside those that slots may
                leave partly empty.
        """
        slots = self._config.max_sequences
        block_bytes = block_tokens * target.kv_cache.bytes_per_token
        free = device.free_bytes()
        budget = self._config.kv_budget_bytes or int(free * _KV_SHARE)
        useful = slots * (-(-context // block_tokens) + 2)
        blocks = min(budget // block_bytes, useful)
        least = 2 * slots + 1
        if blocks < least or budget > free:
            raise InsufficientMemoryError(
                max(least * block_bytes, self._config.kv_budget_bytes or 0),
                free,
                "lower max_sequences or kv_budget_bytes, or export with smaller weights",
            )
        return blocks

    def _choose_target(self) -> TargetInfo:
        target = choose_target(self._folder, self._manifest, "cuda", self._config.target)
        if self._config.form not in (None, _FORM):
            raise ConfigError("form", self._config.form, _FORM)
        if target.kv_cache.block_tokens is None or [g.form for g in target.graphs] != [_FORM]:
            raise PackageError(f"{self._folder}/{target.name} has no paged graph; export it again")
        return target
