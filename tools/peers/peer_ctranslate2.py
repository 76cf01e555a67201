"""CTranslate2: `Generator.generate_batch` on the output of its own converter."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import ctranslate2
import numpy as np
from numpy.typing import NDArray
from peers.worker import TokenIds, serve


class CTranslate2:
    """See `peers.worker.Adapter`. Its API takes tokens by their text."""

    def load(
        self,
        model: Path,
        *,
        threads: int,
        max_batch: int,
        context_tokens: int,
        options: Mapping[str, str],
    ) -> dict[str, str]:
        self.tokens = json.loads((model / "vocabulary.json").read_text("utf-8"))
        self.generator = ctranslate2.Generator(
            str(model), device="cpu", inter_threads=1, intra_threads=threads
        )
        return {"model": f"{self.generator.compute_type} of its converter"}

    def generate(self, prompts: Sequence[TokenIds], new_tokens: int) -> list[TokenIds]:
        results = self.generator.generate_batch(
            [self._texts(prompt) for prompt in prompts],
            max_length=new_tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
            end_token=[len(self.tokens) - 1],  # a token that no text has, so it ends on none
        )
        return [list(result.sequences_ids[0]) for result in results]

    def logits(self, token_ids: TokenIds) -> NDArray[np.float32]:
        found: NDArray[np.float32] = np.array(
            self.generator.forward_batch([self._texts(token_ids)])
        )
        return np.asarray(found[0], dtype=np.float32)

    def _texts(self, token_ids: Sequence[int]) -> list[str]:
        return [self.tokens[i] for i in token_ids]


if __name__ == "__main__":
    serve(CTranslate2())
