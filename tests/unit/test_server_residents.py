"""Models that take turns in a budget of memory: who is loaded when, and who never is unloaded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from resident_samples import WAIT_S, Bench

from headrace.runtime.errors import EngineClosedError, PackageError
from headrace.runtime.server.residents import LoadError

Talk = Callable[[Bench], Coroutine[Any, Any, None]]


def run(needs: dict[str, int], budget: int, talk: Talk) -> None:
    """Have a conversation with residents, then close them."""

    async def main() -> None:
        bench = Bench(needs, budget)
        await bench.residents.start()
        async with asyncio.timeout(WAIT_S):
            await talk(bench)
        for maker in bench.makers.values():
            maker.num_leases = 0
        await bench.residents.close()
        assert not any(maker.is_there for maker in bench.makers.values())

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.001)


async def settled() -> None:
    """After whatever is going to happen at once."""
    for _ in range(20):
        await asyncio.sleep(0.001)


def test_what_fits_is_loaded_at_the_start_in_order() -> None:
    async def talk(bench: Bench) -> None:
        assert bench.there() == "ac"
        assert [bench.residents.num_loads(name) for name in "abc"] == [1, 0, 1]

    run({"a": 5, "b": 6, "c": 5}, 10, talk)


def test_they_take_turns() -> None:
    async def talk(bench: Bench) -> None:
        for name in "abab":
            lease = await bench.lease(name)
            assert lease.name == name and bench.there() == name
            bench.release(lease)
        assert bench.unloads == 3

    run({"a": 6, "b": 6}, 10, talk)


def test_the_longest_unused_goes() -> None:
    async def talk(bench: Bench) -> None:
        first, second = await bench.lease("a"), await bench.lease("b")
        bench.release(second)
        bench.release(first)  # later than b, though it was asked for before
        bench.release(await bench.lease("c"))
        assert bench.there() == "ac"
        bench.release(await bench.lease("b"))
        assert bench.there() == "bc"

    run({"a": 5, "b": 5, "c": 5}, 10, talk)


def test_a_small_one_does_not_go_in_vain() -> None:
    async def talk(bench: Bench) -> None:
        for name in "ab":
            bench.release(await bench.lease(name))
        bench.release(await bench.lease("c"))
        assert bench.there() == "ac" and bench.unloads == 1

    run({"a": 2, "b": 6, "c": 8}, 10, talk)


def test_one_load_for_all_who_wait() -> None:
    async def talk(bench: Bench) -> None:
        bench.makers["b"].gate.clear()
        waiting = [asyncio.create_task(bench.lease("b")) for _ in range(9)]
        await settled()
        bench.makers["b"].gate.set()
        leases = await asyncio.gather(*waiting)
        assert bench.makers["b"].num_loads == 1
        assert len({id(lease.model) for lease in leases}) == 1

    run({"a": 6, "b": 6}, 10, talk)


def test_one_in_use_stays_and_new_ones_queue_behind_who_waits() -> None:
    async def talk(bench: Bench) -> None:
        held = await bench.lease("a")
        other = asyncio.create_task(bench.lease("b"))
        await settled()
        late = asyncio.create_task(bench.lease("a"))  # it would keep `a` in memory for ever
        await settled()
        assert bench.there() == "a" and not other.done() and not late.done()
        bench.release(held)
        lease = await other
        await settled()
        assert bench.there() == "b" and not late.done()
        bench.release(lease)
        await late
        assert bench.there() == "a"

    run({"a": 6, "b": 6}, 10, talk)


def test_nothing_is_unloaded_before_all_of_it_can_be() -> None:
    async def talk(bench: Bench) -> None:
        bench.release(await bench.lease("a"))
        held = await bench.lease("b")
        waiting = asyncio.create_task(bench.lease("c"))
        await settled()
        assert bench.there() == "ab" and not waiting.done()
        bench.release(held)
        await waiting
        assert bench.there() == "c"

    run({"a": 5, "b": 5, "c": 10}, 10, talk)


def test_who_gives_up_keeps_nobody_waiting() -> None:
    async def talk(bench: Bench) -> None:
        await bench.lease("a")
        other = asyncio.create_task(bench.lease("b"))
        await settled()
        late = asyncio.create_task(bench.lease("a"))
        await settled()
        assert not late.done()
        other.cancel()
        await late  # `a` was never unloaded
        assert bench.there() == "a" and bench.unloads == 0 and bench.makers["b"].num_loads == 0

    run({"a": 6, "b": 6}, 10, talk)


def test_leaving_at_the_moment_of_the_grant_leaks_nothing() -> None:
    async def talk(bench: Bench) -> None:
        bench.makers["b"].gate.clear()
        waiting = asyncio.create_task(bench.residents.lease("b"))
        await until(lambda: bench.there() == "")
        granted = False
        grant = bench.residents._grant

        def grant_and_leave(one: Any) -> None:
            nonlocal granted
            grant(one)
            granted = True
            waiting.cancel()

        bench.residents._grant = grant_and_leave  # type: ignore[method-assign]
        bench.makers["b"].gate.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        bench.residents._grant = grant  # type: ignore[method-assign]
        assert granted and bench.there() == "b"
        await bench.lease("a")  # which a lease on b would keep out
        assert bench.there() == "a"

    run({"a": 6, "b": 6}, 10, talk)


def test_a_load_that_fails_is_told_to_all_and_tried_again() -> None:
    async def talk(bench: Bench) -> None:
        bench.makers["b"].broken = 1
        bench.makers["b"].gate.clear()
        waiting = [asyncio.create_task(bench.lease("b")) for _ in range(3)]
        await settled()
        bench.makers["b"].gate.set()
        for problem in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(problem, LoadError) and "b cannot be loaded" in str(problem)
        assert bench.makers["b"].num_loads == 1
        await bench.lease("b")
        assert bench.makers["b"].num_loads == 2

    run({"a": 6, "b": 6}, 10, talk)


def test_a_load_that_fails_at_the_start() -> None:
    async def main() -> None:
        bench = Bench({"a": 6, "b": 4}, 10)
        bench.makers["b"].broken = 1
        with pytest.raises(PackageError):
            await bench.residents.start()
        assert not bench.residents.is_started and bench.there() == "a"
        await bench.residents.close()
        assert not bench.makers["a"].is_there

    asyncio.run(main())


@pytest.mark.parametrize("moment", ["queued", "loading"])
def test_the_end_tells_those_who_wait(moment: str) -> None:
    async def talk(bench: Bench) -> None:
        if moment == "queued":
            bench.release(await bench.lease("a"))
            await bench.residents.lease("a")
        bench.makers["b"].gate.clear()
        waiting = asyncio.create_task(bench.lease("b"))
        await settled()
        closing = asyncio.create_task(bench.residents.close())
        with pytest.raises(EngineClosedError):
            await waiting
        with pytest.raises(EngineClosedError):
            await bench.residents.lease("a")
        bench.makers["b"].gate.set()
        await closing
        assert bench.makers["b"].num_loads == (moment == "loading")

    run({"a": 6, "b": 6}, 10, talk)


def test_the_end_amid_the_start_waits_for_the_load() -> None:
    async def main() -> None:
        bench = Bench({"a": 5, "b": 5}, 10)
        bench.makers["a"].gate.clear()
        starting = asyncio.create_task(bench.residents.start())
        await settled()
        closing = asyncio.create_task(bench.residents.close())
        await settled()
        assert not closing.done()
        bench.makers["a"].gate.set()
        await closing
        await starting
        assert (bench.makers["a"].num_loads, bench.makers["b"].num_loads) == (1, 0)
        assert not bench.makers["a"].is_there

    asyncio.run(main())
