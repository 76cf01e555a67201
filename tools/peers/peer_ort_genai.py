"""onnxruntime-genai: a `Generator` for each batch, on the export of its own model builder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og
from numpy.typing import NDArray
from peers.worker import TokenIds, serve


class OrtGenai:
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
        stated = json.loads((model / "genai_config.json").read_text("utf-8"))["model"]
        self.pad = int(stated["pad_token_id"])
        never = stated["vocab_size"] - 1  # ends on a token that no text has, so on none
        session = {"session_options": {"intra_op_num_threads": threads}}
        config = og.Config(str(model))
        config.overlay(json.dumps({"model": {"eos_token_id": never, "decoder": session}}))
        self.model = og.Model(config)
        return {"model": f"{options['precision']} weights of its model builder"}

    def generate(self, prompts: Sequence[TokenIds], new_tokens: int) -> list[TokenIds]:
        longest = max(map(len, prompts))
        generator = self._generator(len(prompts), longest + new_tokens)
        rows = [[self.pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        generator.append_tokens(np.array(rows, dtype=np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        return [generator.get_sequence(i)[longest:].tolist() for i in range(len(prompts))]

    def logits(self, token_ids: TokenIds) -> NDArray[np.float32]:
        generator = self._generator(1, len(token_ids) + 1)
        generator.append_tokens(np.array([token_ids], dtype=np.int32))
        return np.asarray(generator.get_output("logits")[0], dtype=np.float32)

    def _generator(self, batch: int, max_tokens: int) -> Any:
        params = og.GeneratorParams(self.model)
        params.set_search_options(batch_size=batch, max_length=max_tokens, do_sample=False)
        return og.Generator(self.model, params)


if __name__ == "__main__":
    serve(OrtGenai())
