"""OpenVINO GenAI: `ContinuousBatchingPipeline` on the GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
from peers.worker import TokenIds, serve


class OpenVino:
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
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_seqs = max_batch
        scheduler.max_num_batched_tokens = max_batch * context_tokens  # whole prompts in a step
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(model), scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
        return {"model": "the GGUF file, KV cache u8"}

    def generate(self, prompts: Sequence[TokenIds], new_tokens: int) -> list[TokenIds]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        tensors = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        results = self.pipeline.generate(tensors, [config] * len(tensors))
        return [list(result.m_generation_ids[0]) for result in results]


if __name__ == "__main__":
    serve(OpenVino())
