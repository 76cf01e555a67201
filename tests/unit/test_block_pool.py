"""The KV block pool against plain lists: any order of writes, copies, returns and releases."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.backends.cuda.blocks import BlockCopy, BlockPool
from headrace.runtime.errors import BackendError

SLOTS, BLOCKS, TOKENS = 3, 9, 4
SLOT = st.integers(0, SLOTS - 1)


class PoolMachine(RuleBasedStateMachine):
    """Every token gets a number of its own; memory and lists have to agree about them."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, TOKENS, SLOTS)
        self.memory = [[-1] * TOKENS for _ in range(BLOCKS)]
        self.texts: list[list[int]] = [[] for _ in range(SLOTS)]
        self.written = 0

    @rule(slot=SLOT, back=st.integers(0, 6), new=st.integers(1, 10))
    def write(self, slot: int, back: int, new: int) -> None:
        text = self.texts[slot]
        past = max(0, len(text) - back)
        before = [list(self.pool.table(s)) for s in range(SLOTS)]
        try:
            copies = self.pool.write(slot, past, new)
        except BackendError:
            assert before == [list(self.pool.table(s)) for s in range(SLOTS)]
            assert len(self.pool.table(slot)) + self.pool.num_free < BLOCKS + 1
            return
        for copy in copies:
            self.memory[copy.target] = list(self.memory[copy.source])
        del text[past:]
        for position in range(past, past + new):
            self.written += 1
            block = self.pool.table(slot)[position // TOKENS]
            self.memory[block][position % TOKENS] = self.written
            text.append(self.written)

    @rule(source=SLOT, to=SLOT, share=st.floats(0, 1))
    def copy_prefix(self, source: int, to: int, share: float) -> None:
        if source == to:
            return
        count = int(share * len(self.texts[source]))
        self.pool.share(source, to, count)
        self.texts[to] = self.texts[source][:count]

    @precondition(lambda self: any(self.texts))
    @rule(slot=SLOT)
    def release(self, slot: int) -> None:
        self.pool.release(slot)
        self.texts[slot] = []

    @invariant()
    def every_slot_reads_its_text(self) -> None:
        self.pool.check_integrity()
        for slot, text in enumerate(self.texts):
            held = [self.memory[b][i] for b in self.pool.table(slot) for i in range(TOKENS)]
            assert held[: len(text)] == text
            assert self.pool.held_tokens(slot) == len(text)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_copy_costs_nothing_until_one_of_both_writes() -> None:
    pool = BlockPool(4, 4, 2)
    assert pool.write(0, 0, 6) == []
    pool.share(0, 1, 6)
    assert pool.table(0) == pool.table(1) and pool.num_free == 2
    # The second block holds two tokens of both; who writes first gets another.
    shared = pool.table(0)[1]
    (copy,) = pool.write(1, 6, 1)
    assert copy == BlockCopy(shared, pool.table(1)[1])
    assert pool.write(0, 6, 1) == []
    assert pool.table(0)[0] == pool.table(1)[0]


def test_a_block_that_is_written_from_its_beginning_is_not_copied() -> None:
    pool = BlockPool(4, 4, 2)
    pool.write(0, 0, 8)
    pool.share(0, 1, 8)
    assert pool.write(1, 4, 4) == []
    assert pool.table(0)[1] != pool.table(1)[1]


def test_an_empty_pool_says_what_to_do() -> None:
    pool = BlockPool(2, 4, 2)
    pool.write(0, 0, 5)
    with pytest.raises(BackendError, match="0 blocks of 4 tokens left and a sequence needs 1"):
        pool.write(1, 0, 1)
    assert pool.write(0, 3, 1) == []  # what lies beyond is given back
    assert pool.write(1, 0, 1) == []
