"""headrace: `Runtime.generate` on a package. Idle, its engine thread blocks on its inbox."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from peers.arrivals import Arrival
from peers.worker import TokenIds, serve

from headrace.backends.registry import choose_device, create_backend
from headrace.runtime import Runtime
from headrace.runtime.config import EngineConfig
from headrace.runtime.core import Row, StepPlan
from headrace.runtime.machine.hardware import probe_hardware
from headrace.runtime.manifest import read_manifest


class Headrace:
    """See `peers.worker.Adapter`."""

    def load(
        self,
        model: Path,
        *,
        threads: int,
        max_batch: int,
        context_tokens: int,
        options: Mapping[str, str],
    ) -> dict[str, str]:
        self.runtime = Runtime.load(
            model,
            num_threads=threads,
            max_sequences=max_batch,
            max_draft_tokens=None if options.get("drafts") else 0,
            draft_pool_tokens=0,  # answers of earlier rounds are not to be guessed from
            prefix_cache_bytes=0,  # nor prompts to be kept, which come again
        )
        target = json.loads((model / "manifest.json").read_text(encoding="utf-8"))["targets"][0]
        kv_dtype = target["kv_cache"]["dtype"]
        self.folder, self.threads = model, threads
        return {"model": f"package, {target['precision']}, KV cache {kv_dtype}"}

    def generate(self, prompts: Sequence[TokenIds], new_tokens: int) -> list[TokenIds]:
        completions = self.runtime.generate(
            prompts, max_new_tokens=new_tokens, ignore_eos=True, temperature=0.0
        )
        return [list(completion.token_ids) for completion in completions]

    def serve(self, arrivals: Sequence[Arrival]) -> list[float]:
        start, done_s = time.perf_counter(), [0.0] * len(arrivals)

        def note_end(index: int, delta: object) -> None:
            if delta is None:
                done_s[index] = time.perf_counter() - start

        handles = []
        for index, arrival in enumerate(arrivals):
            time.sleep(max(0.0, arrival.at_s - (time.perf_counter() - start)))
            handle = self.runtime.submit(
                arrival.prompt,
                on_delta=partial(note_end, index),
                max_new_tokens=arrival.new_tokens,
                ignore_eos=True,
                temperature=0.0,
            )
            handles.append(handle)
        for handle in handles:
            handle.result()
        return done_s

    def logits(self, token_ids: TokenIds) -> NDArray[np.float32]:
        manifest = read_manifest(self.folder)
        config = EngineConfig(max_sequences=1, num_threads=self.threads)
        device = choose_device("auto", manifest)
        backend = create_backend(device, self.folder, manifest, config, probe_hardware())
        backend.load()
        try:
            plan = StepPlan(0, (Row(0, 0, 0, tuple(token_ids), len(token_ids)),))
            return np.array(backend.collect(backend.submit(plan)).logits, dtype=np.float32)
        finally:
            backend.close()


if __name__ == "__main__":
    serve(Headrace())
