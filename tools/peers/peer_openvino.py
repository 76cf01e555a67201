"""OpenVINO GenAI: `ContinuousBatchingPipeline` on the GGUF file."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from peers.arrivals import Arrival
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
        self.lookup_tokens = int(options.get("lookup_tokens", 0))
        lookup = {"prompt_lookup": True} if self.lookup_tokens else {}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(model), scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads, **lookup}
        )
        return {"model": "the GGUF file, KV cache u8"}

    def generate(self, prompts: Sequence[TokenIds], new_tokens: int) -> list[TokenIds]:
        config = self._config(new_tokens)
        tensors = [_tensor(ids) for ids in prompts]
        results = self.pipeline.generate(tensors, [config] * len(tensors))
        return [list(result.m_generation_ids[0]) for result in results]

    def serve(self, arrivals: Sequence[Arrival]) -> list[float]:
        start, done_s = time.perf_counter(), [0.0] * len(arrivals)
        running: dict[int, Any] = {}
        coming = list(enumerate(arrivals))
        while coming or running:
            now_s = time.perf_counter() - start
            while coming and coming[0][1].at_s <= now_s:
                index, arrival = coming.pop(0)
                config = self._config(arrival.new_tokens)
                running[index] = self.pipeline.add_request(index, _tensor(arrival.prompt), config)
            if not running:
                time.sleep(coming[0][1].at_s - now_s)
                continue
            self.pipeline.step()
            ended = [
                index
                for index, handle in running.items()
                if handle.get_status() == openvino_genai.GenerationStatus.FINISHED
            ]
            for index in ended:
                done_s[index] = time.perf_counter() - start
                del running[index]
        return done_s

    def _config(self, new_tokens: int) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        if self.lookup_tokens:
            config.num_assistant_tokens, config.max_ngram_size = self.lookup_tokens, 3
        return config


def _tensor(token_ids: TokenIds) -> Any:
    return openvino.Tensor(np.array([token_ids], dtype=np.int64))


if __name__ == "__main__":
    serve(OpenVino())
