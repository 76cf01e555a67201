"""Who has which block of the KV pool. Integers only.

A slot's tokens lie in the blocks of its table, in order; token t is in block t // block_tokens. A
copy of a prefix shares the blocks of the original, and a block that several slots read is left
alone: whoever is to write to it gets one of its own first, with a copy of what it holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.runtime.errors import BackendError


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the whole block `source` to `target`, before anything else is written."""

    source: int
    target: int


class BlockPool:
    """Blocks 0 to `num_blocks` - 1 of `block_tokens` each, for slots 0 to `num_slots` - 1."""

    def __init__(self, num_blocks: int, block_tokens: int, num_slots: int) -> None:
        self.num_blocks, self.block_tokens = num_blocks, block_tokens
        self._free = list(range(num_blocks))[::-1]  # a stack, lowest block first
        self._readers = [0] * num_blocks
        self._tables: list[list[int]] = [[] for _ in range(num_slots)]
        self._lengths = [0] * num_slots

    @property
    def num_free(self) -> int:
        return len(self._free)

    def table(self, slot: int) -> Sequence[int]:
        """Blocks of a slot, in order of its tokens."""
        return self._tables[slot]

    def held_tokens(self, slot: int) -> int:
        return self._lengths[slot]

    def write(self, slot: int, past_len: int, num_tokens: int) -> list[BlockCopy]:
        """Let a slot write to positions [past_len, past_len + num_tokens); drop what lies beyond.

        Returns:
            Copies to make first, in this order.

        Raises:
            BackendError: the pool is empty; nothing was changed.
        """
        assert 0 <= past_len <= self._lengths[slot] and num_tokens > 0
        table, size = self._tables[slot], self.block_tokens
        first, count = past_len // size, -(-(past_len + num_tokens) // size)
        beyond = sum(self._readers[block] == 1 for block in table[count:])
        shared = [i for i in range(first, min(count, len(table))) if self._readers[table[i]] > 1]
        needed = len(shared) + max(0, count - len(table))
        if needed > len(self._free) + beyond:
            raise BackendError(
                f"the KV pool has {len(self._free)} blocks of {size} tokens left and a sequence "
                f"needs {needed}; use fewer or shorter sequences"
            )
        self._drop(table[count:])
        del table[count:]
        copies = []
        for i in shared:
            block = self._take()
            if i * size < past_len:  # it holds tokens that stay
                copies.append(BlockCopy(table[i], block))
            self._drop([table[i]])
            table[i] = block
        table += [self._take() for _ in range(count - len(table))]
        self._lengths[slot] = past_len + num_tokens
        return copies

    def share(self, source: int, target: int, num_tokens: int) -> None:
        """Let `target` hold the first `num_tokens` of `source` and nothing else."""
        assert source != target and 0 <= num_tokens <= self._lengths[source]
        self.release(target)
        blocks = self._tables[source][: -(-num_tokens // self.block_tokens)]
        for block in blocks:
            self._readers[block] += 1
        self._tables[target] = blocks
        self._lengths[target] = num_tokens

    def release(self, slot: int) -> None:
        """The slot holds nothing any more."""
        self._drop(self._tables[slot])
        self._tables[slot] = []
        self._lengths[slot] = 0

    def check_integrity(self) -> None:
        """Assert that every block is free or counted by its readers, and tables are as long as
        their slots' tokens need."""
        readers = Counter(block for table in self._tables for block in table)
        assert [readers[block] for block in range(self.num_blocks)] == self._readers
        assert sorted([*self._free, *readers]) == list(range(self.num_blocks))
        for table, length in zip(self._tables, self._lengths, strict=True):
            assert len(table) == -(-length // self.block_tokens)
            assert len(set(table)) == len(table)

    def _take(self) -> int:
        block = self._free.pop()
        self._readers[block] = 1
        return block

    def _drop(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._readers[block] -= 1
            if not self._readers[block]:
                self._free.append(block)
