"""How much of this machine's memory a package may take, weights and keys and values."""

from __future__ import annotations

from headrace.runtime.config import EngineConfig
from headrace.runtime.errors import InsufficientMemoryError
from headrace.runtime.machine.hardware import HardwareInfo


def require_memory(weight_bytes: int, hardware: HardwareInfo) -> None:
    """Raises InsufficientMemoryError: weights do not fit."""
    free_bytes = hardware.available_memory_bytes
    if weight_bytes > free_bytes:
        raise InsufficientMemoryError(
            weight_bytes, free_bytes, "close other programs or export smaller"
        )


def kv_budget_tokens(
    weight_bytes: int, bytes_per_token: int, config: EngineConfig, hardware: HardwareInfo
) -> int:
    """Tokens in half of the memory that is left beside the weights, or in the user's budget.

    Raises:
        InsufficientMemoryError: not one.
    """
    left_bytes = max(hardware.available_memory_bytes - weight_bytes, 0)
    budget_bytes = config.kv_budget_bytes or left_bytes // 2
    tokens = budget_bytes // bytes_per_token
    if tokens < 1:
        raise InsufficientMemoryError(
            bytes_per_token, budget_bytes, "no room for a single token of KV cache"
        )
    return tokens
