"""Texts whose keys and values lie in slots, for later prompts that begin like them.

A prompt takes over what a kept slot holds, where that is all of it or nearly, and copies it
otherwise: an edited chat or the next agent with the same system prompt finds the original again.
What running sequences have computed can be copied too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.runtime.core import KvCopy, KvOp, KvRelease, KvWrite
from headrace.runtime.scheduling.prefix_index import PrefixIndex
from headrace.runtime.scheduling.slots import SlotPool

MIN_COPY_TOKENS = 16  # fewer are computed as fast
_NOBODY = -1  # owns a slot while it is filled
MIN_WAIT_TOKENS = 64  # so many are worth waiting for until another has computed them


@dataclass(frozen=True, slots=True)
class Prefix:
    """What is there of a text.

    Attributes:
        slot: where `num_tokens` of it are, or None.
        worth_waiting: a running sequence is about to compute much more of it.
    """

    slot: int | None
    num_tokens: int
    worth_waiting: bool


@dataclass(frozen=True, slots=True)
class Placement:
    """A slot for a sequence, `cached_len` tokens of it there once `ops` are done."""

    slot: int
    cached_len: int
    ops: tuple[KvOp, ...]


class PrefixCache:
    """Slots, and what they hold.

    Args:
        budget_tokens: most tokens kept for nobody.
    """

    def __init__(self, pool: SlotPool, budget_tokens: int) -> None:
        self._pool, self._budget_tokens = pool, budget_tokens
        self._index = PrefixIndex()

    def find(self, text: Sequence[int], cached_len: Callable[[int], int]) -> Prefix:
        """The slot with most of a text; `cached_len` tells it of an owned slot."""
        best: tuple[int, int] = (0, 0)
        best_slot: int | None = None
        coming = 0
        for slot, common in self._index.matches(text):
            kept_tokens = self._pool.kept.get(slot)
            ready = common if kept_tokens is not None else min(common, cached_len(slot))
            coming = max(coming, common)
            # Of equally long ones, a kept one of which least would be lost.
            rank = (ready, 0 if kept_tokens is None else 1 + ready - kept_tokens)
            if ready and (best_slot is None or rank > best):
                best, best_slot = rank, slot
        missing = coming - best[0]
        worth_waiting = missing >= MIN_WAIT_TOKENS or (missing > 0 and coming == len(text))
        return Prefix(best_slot, best[0], worth_waiting)

    def place(
        self, owner: int, text: Sequence[int], tokens: int, prefix: Prefix
    ) -> Placement | None:
        """A slot with `tokens` of the budget for a text, and what is there of it; None if there is
        no room even with nothing kept."""
        pool, source = self._pool, prefix.slot
        if not pool.could_fit(tokens):
            return None
        ops: list[KvOp] = []
        here = source is not None and self._is_all_used(source, prefix.num_tokens)
        while not (here and source is not None and pool.fits_kept(source, tokens)) and not (
            not here and pool.fits(tokens)
        ):
            victim = next((slot for slot in pool.kept if slot != source), None)
            if victim is None:  # only the source is left
                assert source is not None and not here
                here = True
                continue
            ops.append(self._evict(victim))
        if here:
            assert source is not None
            pool.take_over(source, owner, tokens)
            slot, cached_len = source, prefix.num_tokens
        else:
            slot, cached_len = pool.acquire(owner, tokens), 0
            if source is not None and prefix.num_tokens >= MIN_COPY_TOKENS:
                ops.append(KvCopy(source, slot, prefix.num_tokens))
                cached_len = prefix.num_tokens
                if source in pool.kept:
                    pool.touch(source)
        self._index.insert(slot, text)
        return Placement(slot, cached_len, tuple(ops))

    def give_up(self, slot: int, held: Sequence[int]) -> list[KvOp]:
        """The owner of a slot has ended or was interrupted; keep what it holds if that pays.

        Args:
            held: the tokens whose keys and values are in the slot; empty where they are not
                to be trusted.
        """
        if not MIN_COPY_TOKENS <= len(held) <= self._budget_tokens:
            return [self._evict(slot)]
        self._pool.keep(slot, len(held))
        self._index.insert(slot, held)
        ops: list[KvOp] = []
        while self._pool.kept_tokens > self._budget_tokens:
            ops.append(self._evict(next(iter(self._pool.kept))))
        return ops

    def restore(self, text: Sequence[int], data: bytes) -> list[KvOp]:
        """Keep a text whose keys and values come from elsewhere; empty where there is no room.

        Other kept texts go for it, running sequences do not.
        """
        pool = self._pool
        if not MIN_COPY_TOKENS <= len(text) <= self._budget_tokens:
            return []
        if not pool.could_fit(len(text)):
            return []
        ops: list[KvOp] = []
        while not pool.fits(len(text)):
            ops.append(self._evict(next(iter(pool.kept))))
        slot = pool.acquire(_NOBODY, len(text))
        ops += [KvWrite(slot, len(text), data), *self.give_up(slot, text)]
        return ops

    def distrust(self, slot: int) -> list[KvOp]:
        """Stop keeping what a slot holds, if it is kept: a copy into it may not have been done."""
        return [self._evict(slot)] if slot in self._pool.kept else []

    def forget_all(self) -> None:
        """Keep nothing of what is kept."""
        for slot in list(self._pool.kept):
            self._evict(slot)

    def check_integrity(self) -> None:
        """Assert that what is kept is within its budget."""
        assert self._pool.kept_tokens <= self._budget_tokens

    def _is_all_used(self, slot: int, num_tokens: int) -> bool:
        held_tokens = self._pool.kept.get(slot)
        return held_tokens is not None and held_tokens - num_tokens < MIN_COPY_TOKENS

    def _evict(self, slot: int) -> KvOp:
        self._pool.release(slot)
        self._index.remove(slot)
        return KvRelease(slot)
