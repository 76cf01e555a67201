"""The CPU backend: one ONNX Runtime session a stage, slots of KV, packed steps.

Calls of a step go through the stages one after the other (the specification) or, with
`micro_batches`, on threads of the stages, so that one stage has a call while another has the next.

On processors with AVX-512 VNNI or AMX the row-INT8 format runs on ONNX Runtime's integer GEMM; on
others the same package runs on its other kernels (see `threads.choose_kernels`).
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Capabilities, Probabilities, StepOutput
from headrace.backends.cpu_avx512.calls import Part, plan_calls, split_calls
from headrace.backends.cpu_avx512.joined import JoinedOutput
from headrace.backends.cpu_avx512.kv_storage import KvStorage
from headrace.backends.cpu_avx512.layout import (
    BoundStep,
    ShapeKey,
    shape_key,
    wants_probabilities,
)
from headrace.backends.cpu_avx512.stage import Stage
from headrace.backends.cpu_avx512.stage_threads import StageThreads
from headrace.backends.cpu_avx512.threads import choose_kernels, choose_threads
from headrace.backends.kv_ops import apply_kv_ops, kv_identity
from headrace.backends.memory_budget import kv_budget_tokens, require_memory
from headrace.backends.ort_import import load_onnxruntime
from headrace.backends.ort_session import cpu_session, map_ort_errors, shrinking
from headrace.backends.targets import choose_target
from headrace.runtime.config import EngineConfig
from headrace.runtime.core import Row, StepPlan
from headrace.runtime.errors import BackendError, ConfigError, PackageError
from headrace.runtime.machine.hardware import HardwareInfo
from headrace.runtime.machine.memory import trim_heap
from headrace.runtime.manifest import (
    BLOCK_MAXIMA,
    HIDDEN,
    LOGITS,
    MAX_ROW_TOKENS,
    GraphInfo,
    Manifest,
    TargetInfo,
    package_path,
)

logger = logging.getLogger(__name__)

# Bound steps kept. Decode needs one a batch composition, of which more sequences have more; prompts
# of odd lengths come and go.
_MIN_BOUND_STEPS, _BOUND_STEPS_PER_SLOT = 32, 2
# Logits rows that the shared buffer has room for, a sequence: its next token and drafts.
_LOGITS_PER_SLOT = 16
# As attention wants them; two INT4 values share a byte.
_KV_TYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "int8": np.dtype(np.int8),
    "int4": np.dtype(np.uint8),
}
_NO_LOGITS = np.empty((0, 0), np.float32)


class CpuBackend:
    """See `backends.base.Backend` for the contract of the four methods."""

    def __init__(
        self, folder: Path, manifest: Manifest, config: EngineConfig, hardware: HardwareInfo
    ) -> None:
        self._folder, self._manifest = folder, manifest
        self._config, self._hardware = config, hardware
        self._stages: list[Stage] = []
        self._stage_threads: StageThreads | None = None
        self._logits, self._probabilities = _NO_LOGITS, Probabilities.empty(0, 0)
        self._next_ticket = 0
        self._results: dict[int, StepOutput] = {}
        self._bound: OrderedDict[tuple[ShapeKey, bool], BoundStep] = OrderedDict()

    def load(self) -> Capabilities:
        target = choose_target(self._folder, self._manifest, "cpu", self._config.target)
        graph = self._choose_graph(target)
        threads = choose_threads(self._hardware, self._config.num_threads)
        formats = {tensor.format for tensor in target.tensors}
        kernels = choose_kernels(self._hardware, formats)
        if kernels.warning:
            logger.warning(kernels.warning)
        require_memory(target.weight_bytes, self._hardware)
        parts = self._parts(graph)
        together = len(parts) if self._config.micro_batches > 1 else 1
        num_threads = max(1, threads.num_threads // together)
        self._stages = [
            Stage(self._open(part, num_threads, kernels.session_options)) for part in parts
        ]
        self._check_vocabulary(graph)
        outputs = self._stages[-1].outputs
        self._gives_probabilities = BLOCK_MAXIMA in outputs
        self._hidden_size = self._manifest.model.hidden_size if HIDDEN in outputs else 0
        self._ragged = graph.form != "uniform"
        model = self._manifest.model
        context = min(model.context_tokens, self._config.context_tokens or model.context_tokens)
        chunk = min(self._config.max_chunk_tokens, MAX_ROW_TOKENS, context)
        slots = self._config.max_sequences
        bytes_per_token = target.kv_cache.bytes_per_token
        budget_tokens = kv_budget_tokens(
            target.weight_bytes, bytes_per_token, self._config, self._hardware
        )
        self._cache = cache = target.kv_cache.dtype
        self._kv = self._storage(context + chunk, slots)
        # Pages come into being where they are written to.
        self._logits, self._probabilities = self._buffers(slots * _LOGITS_PER_SLOT)
        return Capabilities(
            name=f"cpu ({kernels.name}, {num_threads * together} threads)",
            vocab_size=model.vocab_size,
            context_tokens=context,
            max_slots=slots,
            max_row_tokens=chunk,
            kv_bytes_per_token=bytes_per_token,
            kv_budget_tokens=min(budget_tokens, context * slots),
            kv_identity=kv_identity(self._folder, target),
            hidden_size=self._hidden_size,
            exact_rows=cache != "float32"
            and (kernels.exact_4bit or not any(name.endswith("/4bit") for name in formats)),
        )

    def submit(self, plan: StepPlan) -> int:
        if plan.is_rest:
            self._rest()
        reads = apply_kv_ops(self._kv, plan.kv_ops) if plan.kv_ops else ()
        self._next_ticket += 1
        output = self._run(plan.rows)
        self._results[self._next_ticket] = output._replace(kv_reads=reads) if reads else output
        return self._next_ticket

    def collect(self, ticket: int) -> StepOutput:
        return self._results.pop(ticket)

    def close(self) -> None:
        self._end_stage_threads()
        self._bound.clear()
        self._results.clear()
        self._stages = []
        if hasattr(self, "_kv"):
            self._kv.unbind()
            del self._kv
        self._logits, self._probabilities = _NO_LOGITS, Probabilities.empty(0, 0)

    def _rest(self) -> None:
        """Give back what grows with the largest step so far. The next one makes its own again."""
        self._bound.clear()
        self._stages = [stage.unbound() for stage in self._stages]
        self._kv.unbind()
        self._logits, self._probabilities = self._buffers(len(self._logits))
        self._shrink()
        trim_heap()

    def _shrink(self) -> None:
        """Have sessions give back what they keep, which they do behind a run only: of one token,
        in a cache of its own."""
        step = BoundStep(
            [stage.unbound() for stage in self._stages],
            ((0, 1, 1),),
            self._storage(capacity_tokens=1, num_slots=1),
            self._logits,
            None,
            self._manifest.model.hidden_size,
        )
        step.write([Row(seq_id=0, slot=0, past_len=0, tokens=(0,), num_logits=1)])
        with map_ort_errors("giving memory back"):
            step.run(shrinking())

    def _storage(self, capacity_tokens: int, num_slots: int) -> KvStorage:
        model, cache = self._manifest.model, self._cache
        return KvStorage(
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            row_elements=model.head_dim // (2 if cache == "int4" else 1),
            capacity_tokens=capacity_tokens,
            num_slots=num_slots,
            dtype=_KV_TYPES[cache],
        )

    def _open(self, graph: GraphInfo, num_threads: int, entries: Mapping[str, str]) -> Any:
        """The session; a rank of several has one of another kind."""
        return cpu_session(package_path(self._folder, graph.file), num_threads, entries)

    def _run(self, rows: Sequence[Row]) -> StepOutput:
        if not self._stages:
            raise BackendError("the backend is not loaded or was closed")
        calls = plan_calls(rows, ragged=self._ragged, num_heads=self._manifest.model.num_heads)
        calls = split_calls(calls, self._config.micro_batches)
        if len(calls) == 1:
            return self._run_call([part.row for part in calls[0]])
        logits, probabilities = self._buffers(sum(row.num_logits for row in rows))
        sampled = self._is_sampled(rows)
        joined = JoinedOutput(logits, probabilities if sampled else None, self._hidden_size)
        if self._config.micro_batches > 1:
            return self._run_side_by_side(calls, joined)
        model_ms = 0.0
        for call in calls:
            output = self._run_call([part.row for part in call])
            joined.take(call, output)
            model_ms += output.model_ms
        return joined.whole(model_ms)

    def _run_side_by_side(
        self, calls: Sequence[Sequence[Part]], joined: JoinedOutput
    ) -> StepOutput:
        """As one call after the other, on the threads of the stages."""
        threads = self._stage_threads = self._stage_threads or StageThreads(len(self._stages))
        under_way: deque[BoundStep] = deque()
        start = time.perf_counter()
        try:
            for call in calls:
                rows = [part.row for part in call]
                step = self._bound_step(rows)
                while step in under_way or len(under_way) == threads.max_calls:
                    threads.pop()
                    under_way.popleft()
                step.write(rows)
                threads.push(_StagedCall(step, call, joined))
                under_way.append(step)
            for _ in under_way:
                threads.pop()
        except BaseException:
            self._end_stage_threads()  # others begin anew with the next step
            raise
        return joined.whole((time.perf_counter() - start) * 1e3)

    def _end_stage_threads(self) -> None:
        threads, self._stage_threads = self._stage_threads, None
        if threads is not None:
            threads.close()

    def _run_call(self, rows: Sequence[Row]) -> StepOutput:
        step = self._bound_step(rows)
        step.write(rows)
        start = time.perf_counter()
        with map_ort_errors("running a step"):
            step.run()
        return step.output((time.perf_counter() - start) * 1e3)

    def _is_sampled(self, rows: Sequence[Row]) -> bool:
        """Whether probabilities are wanted, and the graph has them."""
        return self._gives_probabilities and wants_probabilities(rows)

    def _bound_step(self, rows: Sequence[Row]) -> BoundStep:
        sampled = self._is_sampled(rows)
        key = (shape_key(rows), sampled)
        step = self._bound.get(key)
        if step is not None:
            self._bound.move_to_end(key)
            return step
        num_logits = sum(row.num_logits for row in rows)
        logits, probabilities = self._logits, self._probabilities
        if num_logits > len(logits):
            logits, probabilities = self._buffers(num_logits)
        step = BoundStep(
            self._stages,
            key[0],
            self._kv,
            logits,
            probabilities if sampled else None,
            self._manifest.model.hidden_size,
        )
        self._bound[key] = step
        kept = max(_MIN_BOUND_STEPS, _BOUND_STEPS_PER_SLOT * self._kv.num_slots)
        if len(self._bound) > kept:
            self._bound.popitem(last=False)
        return step

    def _buffers(self, num_rows: int) -> tuple[NDArray[np.float32], Probabilities]:
        vocab_size = self._manifest.model.vocab_size
        logits = np.empty((num_rows, vocab_size), np.float32)
        return logits, Probabilities.empty(num_rows, vocab_size)

    def _choose_graph(self, target: TargetInfo) -> GraphInfo:
        version = _version_key(load_onnxruntime().__version__)
        graphs = {g.form: g for g in target.graphs if g.form != "tree"}
        wanted = self._config.form
        if wanted is not None and wanted not in graphs:
            raise ConfigError("form", wanted, f"one of {', '.join(graphs)}")
        for form in [wanted] if wanted else ["ragged", "uniform"]:
            if form in graphs and version >= _version_key(graphs[form].min_onnxruntime):
                return graphs[form]
        raise PackageError(
            f"{self._folder}/{target.name} has no graph for this onnxruntime "
            f"{load_onnxruntime().__version__}; update onnxruntime or export with --form uniform"
        )

    def _parts(self, graph: GraphInfo) -> Sequence[GraphInfo]:
        """The graph itself, or its parts if the user wants it in parts."""
        wanted = self._config.stages
        if wanted == 1:
            return [graph]
        if wanted != len(graph.stages):
            had = f"1 or {len(graph.stages)}" if graph.stages else "1"
            raise ConfigError("stages", wanted, f"{had}, or a package exported with --stages")
        return graph.stages

    def _check_vocabulary(self, graph: GraphInfo) -> None:
        shapes = {given.name: given.shape for given in self._stages[-1].session.get_outputs()}
        vocab_size = self._manifest.model.vocab_size
        if LOGITS not in shapes or shapes[LOGITS][-1:] != [vocab_size]:
            raise PackageError(
                f"{self._folder / graph.file} does not give logits of the {vocab_size} tokens that "
                "the manifest counts; export the package again"
            )


@dataclass(frozen=True, slots=True)
class _StagedCall:
    """A call on its way through the stages. The last one copies what came of it, before its next
    call writes to the same buffers."""

    step: BoundStep
    parts: Sequence[Part]
    joined: JoinedOutput

    def run_stage(self, number: int) -> None:
        with map_ort_errors(f"running stage {number}"):
            self.step.run_stage(number)
        if number == self.step.num_stages - 1:
            self.joined.take(self.parts, self.step.output(0.0))


def _version_key(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
