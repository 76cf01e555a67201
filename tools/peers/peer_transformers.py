"""transformers on torch: `generate` with its own cache, prompts of one batch padded on the left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peers.worker import TokenIds, serve
from transformers import AutoModelForCausalLM

_PAD = 0  # masked, so any token will do


class Transformers:
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
        torch.set_num_threads(threads)
        dtype = getattr(torch, options["dtype"])
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        self.model.generation_config.eos_token_id = None  # always all of the tokens
        self.model.generation_config.pad_token_id = _PAD
        lookup = options.get("lookup_tokens")
        self.extra = {"prompt_lookup_num_tokens": int(lookup)} if lookup else {}
        return {"model": f"{options['dtype']} weights and cache"}

    def generate(self, prompts: Sequence[TokenIds], new_tokens: int) -> list[TokenIds]:
        if self.extra and len(prompts) > 1:  # it looks drafts up for one sequence only
            return [self.generate([prompt], new_tokens)[0] for prompt in prompts]
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        rows = [[_PAD] * n + list(ids) for n, ids in zip(padding, prompts, strict=True)]
        mask = [[0] * n + [1] * (longest - n) for n in padding]
        with torch.inference_mode():
            answers = self.model.generate(
                torch.tensor(rows),
                attention_mask=torch.tensor(mask),
                max_new_tokens=new_tokens,
                do_sample=False,
                **self.extra,
            )
        return [list(row) for row in answers[:, longest:].tolist()]

    def logits(self, token_ids: TokenIds) -> NDArray[np.float32]:
        with torch.inference_mode():
            found: NDArray[np.float32] = self.model(torch.tensor([token_ids])).logits[0].float()
        return np.asarray(found)


if __name__ == "__main__":
    serve(Transformers())
