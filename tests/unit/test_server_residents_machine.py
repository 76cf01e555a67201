"""Residents under random requests: the budget holds, and nobody waits without a reason."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from resident_samples import Bench

from headrace.runtime.server.residents import Lease, LoadError

BUDGET = 10
NEEDS = {"a": 3, "b": 4, "c": 6, "d": 10}


class Changes(RuleBasedStateMachine):
    """Requests come, wait, leave, and end in any order. `Maker` asserts that what is loaded fits
    the budget and that nothing with a lease is unloaded."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.bench = Bench(NEEDS, BUDGET)
        self.waiting: list[asyncio.Task[Lease]] = []
        self.leases: list[Lease] = []
        self.do(self.bench.residents.start())

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        async def and_settle() -> Any:
            found = await work
            residents = self.bench.residents
            while True:
                await asyncio.sleep(0)
                if residents._changing.locked() or residents._news.is_set():
                    continue
                return found

        return self.runner.run(and_settle())

    @rule(name=st.sampled_from("abcd"))
    def ask(self, name: str) -> None:
        async def ask() -> None:
            self.waiting.append(asyncio.create_task(self.bench.lease(name)))
            await asyncio.sleep(0)

        self.do(ask())

    @rule(name=st.sampled_from("abcd"))
    def ask_and_leave(self, name: str) -> None:
        async def ask() -> None:
            task = asyncio.create_task(self.bench.lease(name))
            await asyncio.sleep(0)
            task.cancel()
            for problem in await asyncio.gather(task, return_exceptions=True):
                if isinstance(problem, Lease):
                    self.leases.append(problem)

        self.do(ask())

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        async def end() -> None:
            self.bench.release(self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1))))

        self.do(end())

    @rule(name=st.sampled_from("abcd"))
    def damage(self, name: str) -> None:
        self.bench.makers[name].broken = 1

    @invariant()
    def who_waits_has_a_reason(self) -> None:
        self.take_answers()
        residents = self.bench.residents
        taken = sum(NEEDS[name] for name in residents.loaded)
        assert taken <= BUDGET
        assert {m for m in NEEDS if self.bench.makers[m].is_there} == set(residents.loaded)
        if self.waiting:
            assert self.leases, "nobody uses anything, and somebody waits"

    def teardown(self) -> None:
        async def rest() -> None:
            """With leases given back as they come, everybody gets one or is told why not."""
            while self.waiting or self.leases:
                while self.leases:
                    self.bench.release(self.leases.pop())
                await asyncio.sleep(0.0001)
                self.take_answers()

        self.do(rest())
        self.runner.run(self.bench.residents.close())
        self.runner.close()
        assert not any(maker.is_there for maker in self.bench.makers.values())

    def take_answers(self) -> None:
        for task in [task for task in self.waiting if task.done()]:
            self.waiting.remove(task)
            if not isinstance(task.exception(), LoadError):
                self.leases.append(task.result())


TestChanges = Changes.TestCase
TestChanges.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
