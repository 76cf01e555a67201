"""Which models are in memory, where not all of them fit: loaded when somebody asks for one,
unloaded when their room is needed.

One task, the *changer*, does all of it, for one model after another, the one first that was asked
for first. Whoever asks for a model gets a *lease* on it, and a model with a lease is never
unloaded. So that those who ask for it all the time cannot keep it for ever, the changer says which
models are to leave: new leases on them wait as for a model that is not there.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace.runtime.api import Runtime
from headrace.runtime.encoder.embedder import Embedder
from headrace.runtime.errors import EngineClosedError, HeadraceError
from headrace.runtime.machine.memory import trim_heap

logger = logging.getLogger(__name__)

Model = Runtime | Embedder
Loader = Callable[[], Model]


class LoadError(HeadraceError):
    """A model that was asked for cannot be loaded; the log says why."""


@dataclass(frozen=True, slots=True)
class Served:
    """A model that may be asked for.

    Attributes:
        load: makes it; may block. What it makes is closed by `Residents`.
        kind: of what it makes.
        need_bytes: of memory that it takes, all in all.
    """

    load: Loader
    kind: type[Model] = Runtime
    need_bytes: int = 0


class Lease:
    """A model that stays in memory until this is released.

    Attributes:
        name, model: of it.
    """

    def __init__(self, name: str, model: Model, on_release: Callable[[], None]) -> None:
        self.name, self.model = name, model
        self._on_release: Callable[[], None] | None = on_release

    def release(self) -> None:
        """Give the model back. Idempotent."""
        on_release, self._on_release = self._on_release, None
        if on_release is not None:
            on_release()


class _Resident:
    """A model, whether or not it is in memory.

    Attributes:
        last_use: a number that is higher the later it was.
    """

    def __init__(self, name: str, served: Served) -> None:
        self.name, self.served = name, served
        self.model: Model | None = None
        self.num_loads = self.num_leases = self.last_use = 0


class Residents:
    """Models by name. For one event loop; what is not a coroutine may be asked by any thread.

    Args:
        served: none of them needs more than `budget_bytes`.
        budget_bytes: most memory for all that are loaded together; None for no limit.
        before_unload: called in the event loop, while the model is still there.
    """

    def __init__(
        self,
        served: Mapping[str, Served],
        budget_bytes: int | None = None,
        before_unload: Callable[[], object] = lambda: None,
    ) -> None:
        self._all = {name: _Resident(name, one) for name, one in served.items()}
        self._budget_bytes, self._before_unload = budget_bytes, before_unload
        self._uses = itertools.count(1)
        # Who waits, by model, in the order in which models were first asked for.
        self._queue: dict[str, list[asyncio.Future[Lease]]] = {}
        self._leaving: frozenset[str] = frozenset()
        self._news = asyncio.Event()  # of anything that the changer may have waited for
        self._changing = asyncio.Lock()  # held while a model is loaded, unloaded or closed
        self._changer: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def loaded(self) -> Mapping[str, Model]:
        return {name: one.model for name, one in self._all.items() if one.model is not None}

    @property
    def is_started(self) -> bool:
        """Whether models that are not there are loaded when they are asked for."""
        return self._changer is not None

    @property
    def is_closed(self) -> bool:
        return self._closing is not None

    def num_loads(self, name: str) -> int:
        """How often a model was loaded."""
        return self._all[name].num_loads

    async def start(self) -> None:
        """Load those that fit together, in their order; ends early when they are closed.

        Raises:
            Exception: as the loaders do. Those before stay loaded.
        """
        for one in self._all.values():
            if self._fits(one) and not self.is_closed:
                await self._load(one)
        if not self.is_closed:
            self._changer = asyncio.create_task(self._change())

    async def lease(self, name: str) -> Lease:
        """A model, once it is in memory. May be cancelled at any moment.

        Raises:
            LoadError: it cannot be loaded. The next one who asks has it tried again.
            EngineClosedError: all are closed.
        """
        one = self._all[name]
        if self.is_closed:
            raise _closed_error()
        if one.model is not None and name not in self._leaving:
            return self._leased(one, one.model)
        ticket: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._queue.setdefault(name, []).append(ticket)
        self._news.set()
        try:
            return await ticket
        except asyncio.CancelledError:
            if not ticket.cancelled() and ticket.exception() is None:  # it came at the same moment
                ticket.result().release()
            self._news.set()  # nobody may be waiting any more
            raise

    async def close(self) -> None:
        """End what they do, give the memory back, and tell those who wait. Idempotent; waits for a
        model that is being loaded."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
            for name in list(self._queue):
                self._refuse(name, _closed_error())
            self._news.set()
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        async with self._changing:
            for model in self.loaded.values():  # which stay listed: what is asked of them says so
                await asyncio.to_thread(model.close)

    async def _change(self) -> None:
        """The changer."""
        while not self.is_closed:
            self._news.clear()
            if not await self._advance():
                await self._news.wait()

    async def _advance(self) -> bool:
        """Do one thing for the model that was asked for first; False where there is nothing to do
        before something changes."""
        wanted = self._next()
        victims = [] if wanted is None or wanted.model is not None else self._victims(wanted)
        self._leaving = frozenset(victim.name for victim in victims)
        if wanted is None or any(victim.num_leases for victim in victims):
            return False
        try:
            if victims:
                await self._unload(victims[0])
                return True
            if wanted.model is None:
                await self._load(wanted)
        except Exception as error:
            logger.error("cannot load %s", wanted.name, exc_info=error)
            message = f"{wanted.name} cannot be loaded; the server's log says why"
            self._refuse(wanted.name, LoadError(message))
        else:
            self._grant(wanted)
        return True

    def _next(self) -> _Resident | None:
        """The model that is waited for and was asked for first."""
        for name, tickets in list(self._queue.items()):
            if not all(ticket.done() for ticket in tickets):
                return self._all[name]
            del self._queue[name]
        return None

    def _victims(self, wanted: _Resident) -> list[_Resident]:
        """What must be unloaded to make room: those that nobody uses first, and of these the
        longest unused; none that would not help."""
        short = self._short_bytes(wanted)
        loaded = [one for one in self._all.values() if one.model is not None]
        loaded.sort(key=lambda one: (one.num_leases > 0, one.last_use))
        victims: list[_Resident] = []
        for one in loaded:
            if short > 0:
                victims.append(one)
                short -= one.served.need_bytes
        for one in list(victims):  # a small one in vain, where a large one has to go anyway
            if short + one.served.need_bytes <= 0:
                victims.remove(one)
                short += one.served.need_bytes
        return victims

    def _short_bytes(self, wanted: _Resident) -> int:
        """What is missing for one more; 0 or less where it fits."""
        if self._budget_bytes is None:
            return 0
        taken = sum(one.served.need_bytes for one in self._all.values() if one.model is not None)
        return taken + wanted.served.need_bytes - self._budget_bytes

    def _fits(self, wanted: _Resident) -> bool:
        return self._short_bytes(wanted) <= 0

    async def _load(self, one: _Resident) -> None:
        async with self._changing:
            if self.is_closed:
                return
            one.model = await asyncio.to_thread(one.served.load)
        one.num_loads += 1
        one.last_use = next(self._uses)
        logger.info("loaded %s", one.name)

    async def _unload(self, one: _Resident) -> None:
        async with self._changing:
            if self.is_closed or one.model is None:
                return
            self._before_unload()
            close, one.model = one.model.close, None
            await asyncio.to_thread(close)
            del close  # the last reference to it
            await asyncio.to_thread(trim_heap)
        logger.info("unloaded %s", one.name)

    def _leased(self, one: _Resident, model: Model) -> Lease:
        def release() -> None:
            one.num_leases -= 1
            one.last_use = next(self._uses)
            self._news.set()

        one.num_leases += 1
        return Lease(one.name, model, release)

    def _grant(self, one: _Resident) -> None:
        """Give a model to all who wait for it."""
        for ticket in self._queue.pop(one.name, ()):
            if not ticket.done() and one.model is not None:
                ticket.set_result(self._leased(one, one.model))

    def _refuse(self, name: str, error: HeadraceError) -> None:
        for ticket in self._queue.pop(name, ()):
            if not ticket.done():
                ticket.set_exception(error)


def _closed_error() -> EngineClosedError:
    return EngineClosedError("the server is shutting down")
