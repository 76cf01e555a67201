"""Models that only say when they are there, and who changes what is loaded."""

from __future__ import annotations

import threading
from typing import cast

from headrace.runtime.errors import PackageError
from headrace.runtime.server.residents import Lease, Model, Residents, Served

WAIT_S = 60.0  # for what must happen


class Loaded:
    """Stands for a model. Asserts that nobody has a lease on it when it is closed."""

    def __init__(self, maker: Maker) -> None:
        self._maker = maker

    def close(self) -> None:
        maker = self._maker
        assert maker.is_there and not maker.num_leases, "unloaded amid a request"
        maker.is_there = False


class Maker:
    """Loads one of the models, and knows what must be true of it.

    Attributes:
        gate: not loaded before this is set.
        broken: how many of the next loads fail.
    """

    def __init__(self, all_makers: list[Maker], need: int, budget: int) -> None:
        self.need, self.is_there, self.num_loads, self.broken = need, False, 0, 0
        self.num_leases = 0
        self.gate = threading.Event()
        self.gate.set()
        self._all, self._budget = all_makers, budget
        all_makers.append(self)

    def __call__(self) -> Model:
        assert self.gate.wait(WAIT_S)
        self.num_loads += 1
        assert not self.is_there, "loaded twice"
        assert self.need + sum(m.need for m in self._all if m.is_there) <= self._budget
        if self.broken:
            self.broken -= 1
            raise PackageError("it is damaged")
        self.is_there = True
        return cast(Model, Loaded(self))


class Bench:
    """Residents over makers, within a loop of its own."""

    def __init__(self, needs: dict[str, int], budget: int) -> None:
        makers: list[Maker] = []
        self.makers = {name: Maker(makers, need, budget) for name, need in needs.items()}
        served = {name: Served(maker, need_bytes=maker.need) for name, maker in self.makers.items()}
        self.unloads = 0
        self.residents = Residents(served, budget, self._count)

    def _count(self) -> None:
        self.unloads += 1

    async def lease(self, name: str) -> Lease:
        lease = await self.residents.lease(name)
        self.makers[name].num_leases += 1
        return lease

    def release(self, lease: Lease) -> None:
        self.makers[lease.name].num_leases -= 1
        lease.release()

    def there(self) -> str:
        return "".join(sorted(self.residents.loaded))
