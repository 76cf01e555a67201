"""N processes that look like one backend: each has a part of every layer, its cache and the head.

    engine --StepPlan--> every rank --piece, sum, piece, sum ...--> parts of the logits --> engine

Ranks get the same plan and cut it alike. When one dies the step in hand raises EngineProcessError,
the others are ended, and the next step starts them all again, with empty slots.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Capabilities, StepOutput
from headrace.backends.cpu_avx512.threads import choose_threads
from headrace.backends.isolated.backend import Child
from headrace.backends.isolated.values import (
    decode_capabilities,
    decode_error,
    decode_output,
    encode_plan,
    max_output_bytes,
)
from headrace.backends.kv_ops import kv_identity
from headrace.backends.memory_budget import kv_budget_tokens, require_memory
from headrace.backends.targets import choose_target
from headrace.backends.tensor_parallel.watch import StallWatch
from headrace.runtime.child.frames import Frame
from headrace.runtime.child.process import ChildProcess
from headrace.runtime.config import EngineConfig
from headrace.runtime.core import KvWrite, StepPlan
from headrace.runtime.errors import BackendError, EngineProcessError
from headrace.runtime.machine.hardware import HardwareInfo
from headrace.runtime.manifest import Manifest, TargetInfo

_MAX_SUM_BYTES = 1 << 32


class RankChild(Child, Protocol):
    def kill(self) -> None: ...


class TensorParallelBackend:
    """See `backends.base.Backend` for the contract of the four methods.

    Args:
        start: starts a child that runs `rank.serve`.
        gloo: take sums by torch.distributed instead of this process.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        config: EngineConfig,
        hardware: HardwareInfo,
        start: Callable[[], RankChild] = lambda: ChildProcess("rank"),
        *,
        gloo: bool = False,
    ) -> None:
        self._folder, self._manifest, self._hardware = folder, manifest, hardware
        self._start, self._config, self._gloo = start, config, gloo
        self._target: TargetInfo | None = None
        self._watch: StallWatch | None = None
        self._children: list[RankChild] = []
        self._rank_caps: list[Capabilities] = []
        self._caps: Capabilities | None = None
        self._closed = False
        self._next_ticket = 0
        self._plan: StepPlan | None = None
        self._logits = np.empty((0, 0), np.float32)

    def load(self) -> Capabilities:
        self._target = choose_target(
            self._folder, self._manifest, "cpu", self._config.target, ranks=True
        )
        self._caps = self._load(self._target)
        return self._caps

    def submit(self, plan: StepPlan) -> int:
        if self._closed or self._caps is None or self._target is None:
            raise BackendError("the backend is not loaded or was closed")
        if not self._children:
            self._load_again(self._target, self._caps)
        with self._watched():
            for child, own in zip(self._children, self._split(plan, self._target), strict=True):
                header, body = encode_plan(own)
                child.send(header, *body)
        self._next_ticket += 1
        self._plan = plan
        return self._next_ticket

    def collect(self, ticket: int) -> StepOutput:
        """See `Backend`; the arrays are valid until the next `collect`."""
        plan, self._plan = self._plan, None
        watch = self._watch
        assert plan is not None and watch is not None and ticket == self._next_ticket
        with self._watched(), watch.waiting():
            while True:
                frames = [
                    child.receive(max(_MAX_SUM_BYTES, max_output_bytes(plan, caps)))
                    for child, caps in zip(self._children, self._rank_caps, strict=True)
                ]
                watch.moved()
                answer = _together(frames)
                if answer is None:
                    return self._joined(plan, frames)
                for child in self._children:
                    child.send({}, answer.data)

    def close(self) -> None:
        self._closed = True
        self._end_ranks()

    def _load(self, target: TargetInfo) -> Capabilities:
        weight_bytes = sum(rank.weight_bytes for rank in target.ranks)
        require_memory(weight_bytes, self._hardware)
        budget = kv_budget_tokens(
            weight_bytes, target.kv_cache.bytes_per_token, self._config, self._hardware
        )
        threads = choose_threads(self._hardware, self._config.num_threads).num_threads
        with self._watched(), tempfile.TemporaryDirectory(prefix="headrace-") as meeting:
            for number, rank in enumerate(target.ranks):
                config = dataclasses.replace(
                    self._config,
                    target=target.name,
                    isolated=False,
                    draft_package=None,
                    num_threads=max(1, threads // len(target.ranks)),
                    kv_budget_bytes=budget * rank.kv_bytes_per_token,
                )
                self._children.append(self._start())
                self._children[-1].send(
                    {
                        "folder": str(self._folder.absolute()),
                        "rank": number,
                        "gloo": str(Path(meeting) / "ranks") if self._gloo else None,
                        "config": config.to_dict(),
                    }
                )
            answers = [child.receive(0).header for child in self._children]
            for answer in answers:
                if "capabilities" not in answer:
                    raise decode_error(answer.get("error"))
            found = [decode_capabilities(answer["capabilities"]) for answer in answers]
        self._rank_caps = found
        children = list(self._children)
        self._watch = StallWatch(lambda: _kill(children))
        first = found[0]
        return dataclasses.replace(
            first,
            name=f"{len(found)} ranks of {first.name}",
            vocab_size=self._manifest.model.vocab_size,
            kv_bytes_per_token=target.kv_cache.bytes_per_token,
            kv_budget_tokens=min(caps.kv_budget_tokens for caps in found),
            exact_rows=all(caps.exact_rows for caps in found),
            kv_identity=kv_identity(self._folder, target),
        )

    def _load_again(self, target: TargetInfo, caps: Capabilities) -> None:
        """Other processes, with what the scheduler was told of the first."""
        budget_bytes = caps.kv_budget_tokens * caps.kv_bytes_per_token
        self._config = dataclasses.replace(self._config, kv_budget_bytes=budget_bytes)
        if self._load(target) != caps:
            self._end_ranks()
            raise BackendError(f"{self._folder} was changed while it was in use; load it again")

    def _split(self, plan: StepPlan, target: TargetInfo) -> list[StepPlan]:
        """The plan for each rank: what is written to slots is cut, all else is the same."""
        if not any(isinstance(op, KvWrite) for op in plan.kv_ops):
            return [plan] * len(target.ranks)
        plans, first = [], 0
        for rank in target.ranks:
            ops = []
            for op in plan.kv_ops:
                if isinstance(op, KvWrite):
                    start = first * op.num_tokens
                    stop = start + rank.kv_bytes_per_token * op.num_tokens
                    op = dataclasses.replace(op, data=op.data[start:stop])
                ops.append(op)
            plans.append(dataclasses.replace(plan, kv_ops=tuple(ops)))
            first += rank.kv_bytes_per_token
        return plans

    def _joined(self, plan: StepPlan, frames: Sequence[Frame]) -> StepOutput:
        outputs = [
            decode_output(frame.header, frame.body, caps)
            for frame, caps in zip(frames, self._rank_caps, strict=True)
        ]
        shape = (plan.num_logits, self._manifest.model.vocab_size)
        if len(self._logits) < shape[0]:
            self._logits = np.empty(shape, np.float32)
        logits = np.concatenate(
            [output.logits for output in outputs], axis=1, out=self._logits[: shape[0]]
        )
        reads = tuple(b"".join(parts) for parts in zip(*(o.kv_reads for o in outputs), strict=True))
        model_ms = max(output.model_ms for output in outputs)
        return StepOutput(logits, outputs[0].entropy_nats, model_ms, None, reads)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Ranks that are out of step with each other are of no use any more."""
        try:
            yield
        except BaseException:
            self._end_ranks()
            raise

    def _end_ranks(self) -> None:
        children, self._children, self._plan = self._children, [], None
        if self._watch is not None:
            self._watch.close()
        for child in children:
            child.close()


def _kill(children: Sequence[RankChild]) -> None:
    """Whoever waits for them hears of their end."""
    for child in children:
        child.kill()


def _together(frames: Sequence[Frame]) -> NDArray[Any] | None:
    """What the ranks wait for; None where their step is over.

    Raises:
        EngineProcessError: a rank failed, or they do not do the same.
    """
    for frame in frames:
        if "error" in frame.header:  # the others wait for it, and their caches have gone on
            raise EngineProcessError(f"a rank failed: {decode_error(frame.header['error'])}")
    kinds = {next(iter(frame.header), "") for frame in frames}
    if kinds == {"model_ms"}:
        return None
    if len(kinds) > 1 or not kinds <= {"sum", "gather"}:
        raise EngineProcessError("the rank processes are out of step")
    (kind,) = kinds
    dtype = {"float32": np.float32, "float16": np.float16}[frames[0].header[kind]]
    values = np.stack([np.frombuffer(frame.body, dtype) for frame in frames])
    if kind == "gather":
        return values
    return np.asarray(values.sum(axis=0, dtype=np.float32), dtype)
