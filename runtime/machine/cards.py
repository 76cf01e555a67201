"""What the cards of a machine are best used as. Pure functions of a description."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

# Compute capabilities of A100, H100 and H200, B200 and B300. Others are sold for single cards, and
# their links, where they have any, are a tenth as fast.
_FOR_GROUPS = ("8.0", "9.0", "10.0", "10.3")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card. `linked`: numbers of the cards that it has NVLink to."""

    name: str
    compute_capability: str
    total_memory_bytes: int
    free_memory_bytes: int
    linked: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CardUse:
    """`cards` that should work on one model together, none for the processors, and why."""

    cards: tuple[int, ...]
    reason: str


def best_use(gpus: Sequence[Gpu]) -> CardUse:
    """Tensor parallel over the largest group of cards made for that and linked with each other, or
    the card with the most free memory, or none."""
    if not gpus:
        return CardUse((), "no card: the processors")
    able = [i for i, gpu in enumerate(gpus) if gpu.compute_capability in _FOR_GROUPS]
    for size in range(len(able), 1, -1):
        for group in combinations(able, size):
            if all(b in gpus[a].linked for a, b in combinations(group, 2)):
                return CardUse(group, f"{size} cards linked by NVLink: tensor parallel")
    roomiest = max(range(len(gpus)), key=lambda i: gpus[i].free_memory_bytes)
    if len(gpus) == 1:
        why = "one card"
    elif not able:
        why = f"{gpus[roomiest].name} is made to work alone"
    else:
        why = "no NVLink between cards"
    return CardUse((roomiest,), f"{why}: a whole model on it")
