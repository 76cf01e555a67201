"""What an engine may take on at once, from its options and what the backend can."""

from __future__ import annotations

from headrace.backends.base import Capabilities
from headrace.runtime.config import EngineConfig
from headrace.runtime.scheduling.limits import Limits


def engine_limits(config: EngineConfig, caps: Capabilities) -> Limits:
    """The scheduler's limits."""
    kept = config.prefix_cache_bytes
    return Limits(
        max_slots=min(config.max_sequences, caps.max_slots),
        context_tokens=min(config.context_tokens or caps.context_tokens, caps.context_tokens),
        kv_budget_tokens=caps.kv_budget_tokens,
        kv_bytes_per_token=caps.kv_bytes_per_token,
        prefix_cache_tokens=caps.kv_budget_tokens
        if kept is None
        else kept // caps.kv_bytes_per_token,
        max_chunk_tokens=min(config.max_chunk_tokens, caps.max_row_tokens),
        inter_token_bound_ms=config.inter_token_bound_ms,
    )
