"""The process of a rank: the backend of its device, on the rank's own pieces."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Backend
from headrace.backends.cpu_avx512.backend import CpuBackend
from headrace.backends.isolated.serve import MAX_BODY_BYTES, serve_backend
from headrace.backends.ort_session import cpu_session, share_threads
from headrace.backends.tensor_parallel.chain import Chain, Collective
from headrace.backends.tensor_parallel.gloo import GlooCollective
from headrace.runtime.child.entry import Link
from headrace.runtime.config import EngineConfig
from headrace.runtime.machine.hardware import probe_hardware
from headrace.runtime.manifest import GraphInfo, Manifest, TargetInfo, package_path, read_manifest


def serve(link: Link) -> None:
    """Load what the first message names and run steps until the link ends."""

    def rank(wanted: Mapping[str, Any]) -> Backend:
        folder, number = Path(wanted["folder"]), int(wanted["rank"])
        config = EngineConfig.from_dict(wanted["config"])
        manifest = read_manifest(folder)
        target = next(t for t in manifest.targets if t.name == config.target)
        collective: Collective = LinkCollective(link)
        if wanted["gloo"] is not None:
            collective = GlooCollective(Path(wanted["gloo"]), number, len(target.ranks))
        return _CpuRank(folder, manifest, target, number, config, collective)

    serve_backend(link, rank)


class LinkCollective:
    """Sums and gathers by the parent, through the pipes that plans come by. No socket is opened."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def all_reduce(self, values: NDArray[Any]) -> None:
        answer = self._ask("sum", values)
        values[...] = np.frombuffer(answer, values.dtype).reshape(values.shape)

    def all_gather(self, values: NDArray[Any]) -> NDArray[Any]:
        answer = self._ask("gather", values)
        return np.frombuffer(answer, values.dtype).reshape(-1, *values.shape)

    def close(self) -> None:
        """The link belongs to others."""

    def _ask(self, kind: str, values: NDArray[Any]) -> memoryview:
        self._link.send({kind: values.dtype.name}, values.data)
        return self._link.receive(MAX_BODY_BYTES).body


def rank_manifest(manifest: Manifest, target: TargetInfo, number: int) -> Manifest:
    """The package as one rank sees it.

    Query heads stay those of the whole model: they decide how a step is cut into calls, which has
    to be the same on all ranks.
    """
    rank = target.ranks[number]
    graphs = tuple(
        GraphInfo(
            form=pieces.form,
            file=pieces.files[0],
            min_onnxruntime=pieces.min_onnxruntime,
            inputs=pieces.inputs,
            outputs=pieces.outputs,
        )
        for pieces in rank.graphs
    )
    cache = dataclasses.replace(target.kv_cache, bytes_per_token=rank.kv_bytes_per_token)
    own = dataclasses.replace(
        target, kv_cache=cache, graphs=graphs, weight_bytes=rank.weight_bytes, ranks=()
    )
    model = dataclasses.replace(
        manifest.model, num_kv_heads=rank.num_kv_heads, vocab_size=rank.num_tokens
    )
    return dataclasses.replace(manifest, model=model, targets=(own,))


class _CpuRank(CpuBackend):
    """Its session is a chain."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        target: TargetInfo,
        number: int,
        config: EngineConfig,
        collective: Collective,
    ) -> None:
        super().__init__(folder, rank_manifest(manifest, target, number), config, probe_hardware())
        self._pieces = {g.form: g.files for g in target.ranks[number].graphs}
        self._collective = collective

    def _open(self, graph: GraphInfo, num_threads: int, entries: Any) -> Chain:
        # So many sessions with threads of their own would be in each other's way.
        share_threads(num_threads)
        files = [package_path(self._folder, file) for file in self._pieces[graph.form]]
        return Chain([cpu_session(file, num_threads, entries) for file in files], self._collective)
