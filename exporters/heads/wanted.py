"""What to collect for the training of heads, and what was."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CHUNK_TOKENS = 512  # of a given text
Half = NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to collect.

    Attributes:
        prompts: messages of users, each the first of a conversation.
        answers: to each prompt; the first is greedy, the others are sampled.
        text: cut into chunks of `CHUNK_TOKENS`; what is left over is not used.
    """

    prompts: tuple[str, ...]
    answers: int
    text: str


@dataclass(frozen=True, slots=True)
class Collected:
    """Texts, one after the other.

    Attributes:
        tokens: int64 [n].
        states: float16 [n, hidden], mapped: each is what its token was drawn from.
        starts: of each text in them, and n.
    """

    tokens: NDArray[np.int64]
    states: Half
    starts: list[int]
