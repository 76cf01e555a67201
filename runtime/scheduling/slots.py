"""Who owns which KV slot, and how many tokens of KV are promised to whom. Integers only.

A slot is a row of the backend's KV storage. The backend binds the range from the lowest to the
highest busy slot, so the lowest free one is always given out first. A slot is free, owned by a
running sequence, or *kept*: nobody's, but with a text that a later sequence may begin with.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping


class SlotPool:
    """Slots 0 to `num_slots` - 1 under a common budget of tokens."""

    def __init__(self, num_slots: int, budget_tokens: int) -> None:
        self.num_slots, self.budget_tokens = num_slots, budget_tokens
        self.owned_tokens = self.kept_tokens = 0
        self._free = list(range(num_slots))  # a heap
        self._owners: dict[int, tuple[int, int]] = {}  # slot: (owner, tokens)
        self._kept: dict[int, int] = {}  # slot: tokens; the longest unused first

    @property
    def num_free(self) -> int:
        """Slots that no running sequence owns."""
        return len(self._free) + len(self._kept)

    @property
    def kept(self) -> Mapping[int, int]:
        """Tokens of each kept slot, the longest unused first."""
        return self._kept

    def owner(self, slot: int) -> int | None:
        owned = self._owners.get(slot)
        return None if owned is None else owned[0]

    def could_fit(self, tokens: int) -> bool:
        """Whether it would fit if nothing were kept."""
        return self.num_free > 0 and self.owned_tokens + tokens <= self.budget_tokens

    def fits(self, tokens: int) -> bool:
        """Whether a free slot can be had with so many tokens."""
        return bool(self._free) and self._in_budget(tokens)

    def fits_kept(self, slot: int, tokens: int) -> bool:
        """Whether a kept slot can be had with so many tokens."""
        return self._in_budget(tokens - self._kept[slot])

    def acquire(self, owner: int, tokens: int) -> int:
        """The lowest free slot, with `tokens` of the budget; `fits(tokens)` must hold."""
        assert self.fits(tokens)
        slot = heapq.heappop(self._free)
        self._own(slot, owner, tokens)
        return slot

    def take_over(self, slot: int, owner: int, tokens: int) -> None:
        """Own a kept slot, what it holds included; `fits_kept(slot, tokens)` must hold."""
        assert self.fits_kept(slot, tokens)
        self.kept_tokens -= self._kept.pop(slot)
        self._own(slot, owner, tokens)

    def keep(self, slot: int, tokens: int) -> None:
        """An owned slot is given up, but its text stays."""
        self._disown(slot)
        self._kept[slot] = tokens
        self.kept_tokens += tokens

    def touch(self, slot: int) -> None:
        """A kept slot was of use."""
        self._kept[slot] = self._kept.pop(slot)

    def release(self, slot: int) -> None:
        """Give an owned or kept slot and its share of the budget back."""
        if slot in self._kept:
            self.kept_tokens -= self._kept.pop(slot)
        else:
            self._disown(slot)
        heapq.heappush(self._free, slot)

    def check_integrity(self) -> None:
        """Assert that every slot is free, kept or owned by one, within the budget."""
        assert sorted([*self._free, *self._owners, *self._kept]) == list(range(self.num_slots))
        owners = [owner for owner, _ in self._owners.values()]
        assert len(set(owners)) == len(owners)
        assert sum(tokens for _, tokens in self._owners.values()) == self.owned_tokens
        assert sum(self._kept.values()) == self.kept_tokens
        assert self._in_budget(0)

    def _in_budget(self, more_tokens: int) -> bool:
        return self.owned_tokens + self.kept_tokens + more_tokens <= self.budget_tokens

    def _own(self, slot: int, owner: int, tokens: int) -> None:
        self._owners[slot] = owner, tokens
        self.owned_tokens += tokens

    def _disown(self, slot: int) -> None:
        _, tokens = self._owners.pop(slot)
        self.owned_tokens -= tokens
