"""Who owns which KV slot, and how many tokens of KV are promised to whom. Integers only.

A slot is a row of the backend's KV storage. The backend binds the range from the lowest to the
highest busy slot, so the lowest free one is always given out first.
"""

from __future__ import annotations

import heapq


class SlotPool:
    """Slots 0 to `num_slots` - 1 under a common budget of tokens."""

    def __init__(self, num_slots: int, budget_tokens: int) -> None:
        self.num_slots, self.budget_tokens = num_slots, budget_tokens
        self.reserved_tokens = 0
        self._free = list(range(num_slots))  # a heap
        self._owners: dict[int, tuple[int, int]] = {}  # slot -> (owner, reserved tokens)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def owner(self, slot: int) -> int | None:
        owned = self._owners.get(slot)
        return None if owned is None else owned[0]

    def fits(self, tokens: int) -> bool:
        return bool(self._free) and self.reserved_tokens + tokens <= self.budget_tokens

    def acquire(self, owner: int, tokens: int) -> int:
        """The lowest free slot, with `tokens` of the budget; `fits(tokens)` must hold."""
        assert self.fits(tokens)
        slot = heapq.heappop(self._free)
        self._owners[slot] = owner, tokens
        self.reserved_tokens += tokens
        return slot

    def release(self, slot: int) -> None:
        """Give a slot and its share of the budget back."""
        _, tokens = self._owners.pop(slot)
        self.reserved_tokens -= tokens
        heapq.heappush(self._free, slot)

    def check_integrity(self) -> None:
        """Assert that every slot is either free or owned by one, within the budget."""
        assert sorted([*self._free, *self._owners]) == list(range(self.num_slots))
        owners = [owner for owner, _ in self._owners.values()]
        assert len(set(owners)) == len(owners)
        assert sum(tokens for _, tokens in self._owners.values()) == self.reserved_tokens
        assert self.reserved_tokens <= self.budget_tokens
