"""Repetition, presence and frequency penalties: what they do to logits is in `sampling`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.runtime.config import GenerationConfig


def has_penalty(config: GenerationConfig) -> bool:
    """Whether any of the three changes a logit."""
    penalties = (config.presence_penalty, config.frequency_penalty)
    return config.repetition_penalty != 1.0 or any(penalties)


class Penalties:
    """Tokens seen so far with their counts in the answer, in arrays that grow by doubling."""

    def __init__(self, config: GenerationConfig, prompt: Sequence[int]) -> None:
        self._repetition = config.repetition_penalty
        self._presence = config.presence_penalty
        self._frequency = config.frequency_penalty
        seen = sorted(set(prompt)) if self._repetition != 1.0 else []
        self._index = {token: i for i, token in enumerate(seen)}
        self._ids = np.zeros(max(64, 2 * len(seen)), np.int64)
        self._ids[: len(seen)] = seen
        self._counts = np.zeros(self._ids.size, np.float64)

    def add(self, token_id: int) -> None:
        """Count a token of the answer."""
        index = self._index.setdefault(token_id, len(self._index))
        if index == self._ids.size:
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[index] = token_id
        self._counts[index] += 1

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Change logits, float32 [vocab], in place; computed in float64."""
        size = len(self._index)
        ids, counts = self._ids[:size], self._counts[:size]
        values = logits[ids].astype(np.float64)
        if self._repetition != 1.0:
            values = np.where(values > 0, values / self._repetition, values * self._repetition)
        if self._presence or self._frequency:
            values -= self._frequency * counts + self._presence * (counts > 0)
        logits[ids] = values
