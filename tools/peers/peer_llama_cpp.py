"""llama.cpp through llama-cpp-python, in two ways.

"batched" is the low-level API that servers use: one `llama_batch` a step with a row of each
sequence. "serial" is the `Llama` object, which decodes one prompt at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from peers.worker import Adapter, TokenIds, serve

_PHYSICAL_BATCH_TOKENS = 512  # llama.cpp's own default


class Batched:
    """One context for each batch size, so that none pays for sequences it does not have."""

    def load(
        self,
        model: Path,
        *,
        threads: int,
        max_batch: int,
        context_tokens: int,
        options: Mapping[str, str],
    ) -> dict[str, str]:
        llama_cpp.llama_backend_init()
        self.threads, self.context_tokens = threads, context_tokens
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(model).encode(), params)
        if not self.model:
            raise OSError(f"llama.cpp cannot load {model}")
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocabulary_size = int(llama_cpp.llama_vocab_n_tokens(vocabulary))
        self.contexts: dict[int, Any] = {}
        return _about()

    def generate(self, prompts: Sequence[TokenIds], new_tokens: int) -> list[TokenIds]:
        context = self._context(len(prompts))
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        capacity = max(len(rows), len(prompts))
        batch = llama_cpp.llama_batch_init(capacity, 0, 1)
        try:
            newest = self._step(context, batch, rows)
            answers = [[token] for token in newest]
            for n in range(1, new_tokens):
                newest = self._step(
                    context,
                    batch,
                    [(t, len(prompts[s]) + n - 1, s, True) for s, t in enumerate(newest)],
                )
                for answer, token in zip(answers, newest, strict=True):
                    answer.append(token)
        finally:
            llama_cpp.llama_batch_free(batch)
        return answers

    def _step(
        self, context: Any, batch: Any, rows: Sequence[tuple[int, int, int, bool]]
    ) -> TokenIds:
        """Decode rows of (token, position, sequence, whether logits are wanted); greedy picks."""
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = wanted
        code = llama_cpp.llama_decode(context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        return [self._greedy(context, i) for i, row in enumerate(rows) if row[3]]

    def _greedy(self, context: Any, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, row)
        pointer = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(pointer, (self.vocabulary_size,)).argmax())

    def _context(self, batch: int) -> Any:
        if batch not in self.contexts:
            params = llama_cpp.llama_context_default_params()
            params.n_ctx = batch * self.context_tokens
            params.n_batch = batch * self.context_tokens
            params.n_ubatch = min(_PHYSICAL_BATCH_TOKENS, params.n_batch)
            params.n_seq_max = batch
            params.n_threads = params.n_threads_batch = self.threads
            context = llama_cpp.llama_init_from_model(self.model, params)
            if not context:
                raise MemoryError(f"llama.cpp makes no context for {batch} sequences")
            self.contexts[batch] = context
        return self.contexts[batch]


class Serial:
    """What most users of llama-cpp-python write."""

    def load(
        self,
        model: Path,
        *,
        threads: int,
        max_batch: int,
        context_tokens: int,
        options: Mapping[str, str],
    ) -> dict[str, str]:
        self.llama = llama_cpp.Llama(
            str(model),
            n_ctx=context_tokens,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )
        return _about()

    def generate(self, prompts: Sequence[TokenIds], new_tokens: int) -> list[TokenIds]:
        return [self._one(prompt, new_tokens) for prompt in prompts]

    def _one(self, prompt: TokenIds, new_tokens: int) -> TokenIds:
        self.llama.reset()
        tokens: Iterable[int] = self.llama.generate(prompt, temp=0.0)
        return list(islice(tokens, new_tokens))


def _about() -> dict[str, str]:
    features = llama_cpp.llama_print_system_info().decode()
    used = [part.split("=")[0].strip() for part in features.split("|") if part.strip()[-1:] == "1"]
    return {"model": "the GGUF file, KV cache f16", "built_with": " ".join(used)}


class ByMode:
    """Becomes the adapter that the load request names."""

    def load(
        self,
        model: Path,
        *,
        threads: int,
        max_batch: int,
        context_tokens: int,
        options: Mapping[str, str],
    ) -> Mapping[str, str]:
        self.chosen: Adapter = Serial() if options["mode"] == "serial" else Batched()
        return self.chosen.load(
            model,
            threads=threads,
            max_batch=max_batch,
            context_tokens=context_tokens,
            options=options,
        )

    def generate(self, prompts: Sequence[TokenIds], new_tokens: int) -> list[TokenIds]:
        return self.chosen.generate(prompts, new_tokens)


if __name__ == "__main__":
    serve(ByMode())
