"""headrace: `Runtime.generate` on a package. Idle, its engine thread blocks on its inbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from peers.worker import TokenIds, serve

from headrace.runtime import Runtime


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
            max_draft_tokens=0,  # as with the others
            prefix_cache_bytes=0,  # prompts come again, and are to be computed again
        )
        target = json.loads((model / "manifest.json").read_text(encoding="utf-8"))["targets"][0]
        kv_dtype = target["kv_cache"]["dtype"]
        return {"model": f"package, {target['precision']}, KV cache {kv_dtype}"}

    def generate(self, prompts: Sequence[TokenIds], new_tokens: int) -> list[TokenIds]:
        completions = self.runtime.generate(
            prompts, max_new_tokens=new_tokens, ignore_eos=True, temperature=0.0
        )
        return [list(completion.token_ids) for completion in completions]


if __name__ == "__main__":
    serve(Headrace())
