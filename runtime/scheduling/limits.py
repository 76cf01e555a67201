"""How many sequences, how long, and how much of their KV."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.runtime.errors import InsufficientMemoryError, PromptTooLongError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a backend and a configuration leave room for.

    Attributes:
        max_slots: sequences in flight.
        context_tokens: longest sequence, prompt and answer.
        kv_budget_tokens: tokens of KV over all slots.
        kv_bytes_per_token: for messages.
        prefix_cache_tokens: of them, most that are kept of texts that have ended.
        max_chunk_tokens: most prompt tokens in a step.
        inter_token_bound_ms: time that prompts may add to a step while others decode.
    """

    max_slots: int
    context_tokens: int
    kv_budget_tokens: int
    kv_bytes_per_token: int
    prefix_cache_tokens: int
    max_chunk_tokens: int
    inter_token_bound_ms: float

    def new_tokens(self, prompt_len: int, wanted: int | None) -> int:
        """How many tokens a sequence may generate: `wanted` within the context; None fills it.

        Raises:
            PromptTooLongError: the context has no room for one.
            InsufficientMemoryError: the KV budget could never hold prompt and answer.
        """
        room = self.context_tokens - prompt_len
        if room < 1:
            raise PromptTooLongError(prompt_len, self.context_tokens)
        if wanted is None:
            granted = max(1, min(room, self.kv_budget_tokens - prompt_len))
        else:
            granted = min(wanted, room)
        if prompt_len + granted > self.kv_budget_tokens:
            raise InsufficientMemoryError(
                (prompt_len + granted) * self.kv_bytes_per_token,
                self.kv_budget_tokens * self.kv_bytes_per_token,
                f"a prompt of {prompt_len} tokens and {granted} new ones exceed the KV cache; "
                "lower max_new_tokens or raise kv_budget_bytes",
            )
        return granted
