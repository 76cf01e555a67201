"""llama.cpp through llama-cpp-python, in two ways.

"batched" is the low-level API that servers use: one `llama_batch` a step with a row of each
sequence. "serial" is the `Llama` object, which decodes one prompt at a time.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from numpy.typing import NDArray
from peers.arrivals import Arrival, serve_in_batches
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
        self.threads, self.context_tokens, self.max_batch = threads, context_tokens, max_batch
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

    def serve(self, arrivals: Sequence[Arrival]) -> list[float]:
        """As llama.cpp's server: whole prompts of whom a slot is free for, beside decode rows."""
        context = self._context(self.max_batch)
        memory = llama_cpp.llama_get_memory(context)
        llama_cpp.llama_memory_clear(memory, False)
        batch = llama_cpp.llama_batch_init(self.max_batch * self.context_tokens, 0, 1)
        start, done_s = time.perf_counter(), [0.0] * len(arrivals)
        free, coming = list(range(self.max_batch)), list(enumerate(arrivals))
        running: dict[int, tuple[int, int, int]] = {}  # slot: request, newest token, its place
        try:
            while coming or running:
                now_s = time.perf_counter() - start
                rows = [(token, place, slot, True) for slot, (_, token, place) in running.items()]
                places = dict(running)
                while coming and free and coming[0][1].at_s <= now_s:
                    (index, arrival), slot = coming.pop(0), free.pop(0)
                    last = len(arrival.prompt) - 1
                    rows += [(t, i, slot, i == last) for i, t in enumerate(arrival.prompt)]
                    places[slot] = (index, 0, last)
                if not rows:
                    time.sleep(coming[0][1].at_s - now_s)
                    continue
                newest = self._step(context, batch, rows)
                for (slot, (index, _, place)), token in zip(places.items(), newest, strict=True):
                    end = len(arrivals[index].prompt) + arrivals[index].new_tokens - 1
                    running[slot] = (index, token, place + 1)
                    if place + 1 == end:
                        done_s[index] = time.perf_counter() - start
                        del running[slot]
                        free.append(slot)
                        llama_cpp.llama_memory_seq_rm(memory, slot, -1, -1)
        finally:
            llama_cpp.llama_batch_free(batch)
        return done_s

    def logits(self, token_ids: TokenIds) -> NDArray[np.float32]:
        context = self._context(1)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        batch = llama_cpp.llama_batch_init(len(token_ids), 0, 1)
        try:
            rows = [(token, position, 0, True) for position, token in enumerate(token_ids)]
            self._decode(context, batch, rows)
            return np.stack([self._logits(context, i) for i in range(len(rows))])
        finally:
            llama_cpp.llama_batch_free(batch)

    def _step(
        self, context: Any, batch: Any, rows: Sequence[tuple[int, int, int, bool]]
    ) -> TokenIds:
        """Decode rows; greedy picks of those whose logits are wanted."""
        self._decode(context, batch, rows)
        return [int(self._logits(context, i).argmax()) for i, row in enumerate(rows) if row[3]]

    def _decode(self, context: Any, batch: Any, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """Decode rows of (token, position, sequence, whether logits are wanted)."""
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = wanted
        code = llama_cpp.llama_decode(context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")

    def _logits(self, context: Any, row: int) -> NDArray[np.float32]:
        """A view that the next call of `_decode` overwrites."""
        logits = llama_cpp.llama_get_logits_ith(context, row)
        pointer = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        view: NDArray[np.float32] = np.ctypeslib.as_array(pointer, (self.vocabulary_size,))
        return view

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
        lookup = int(options.get("lookup_tokens", 0))
        self.llama = llama_cpp.Llama(
            str(model),
            n_ctx=context_tokens + lookup + 1,  # drafts may pass the end
            n_threads=threads,
            n_threads_batch=threads,
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None,
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

    def serve(self, arrivals: Sequence[Arrival]) -> list[float]:
        if not isinstance(self.chosen, Batched):
            return serve_in_batches(self.chosen.generate, arrivals, max_batch=1)
        return self.chosen.serve(arrivals)

    def logits(self, token_ids: TokenIds) -> NDArray[np.float32]:
        if not isinstance(self.chosen, Batched):
            raise NotImplementedError("asked of the batched mode")
        return self.chosen.logits(token_ids)


if __name__ == "__main__":
    serve(ByMode())
