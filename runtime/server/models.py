"""What is served: models by the names that requests call them, each lent to whoever asks for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from headrace.runtime.api import Runtime
from headrace.runtime.encoder.embedder import Embedder
from headrace.runtime.errors import EngineClosedError
from headrace.runtime.server.problems import ApiError
from headrace.runtime.server.residents import Lease, LoadError, Model, Residents, Served

_DOES = {Runtime: "generate text", Embedder: "make embeddings"}
_WAIT_S = 60.0


class Models:
    """Models that take turns where a budget of memory does not hold them all together.

    For one event loop; what is not a coroutine may be asked by any thread.

    Args:
        served: by name, in the order in which they are loaded. What they make is closed by `close`.
        budget_bytes: see `Residents`.
        wait_s: longest that a request waits for its model.
    """

    def __init__(
        self,
        served: Mapping[str, Served],
        budget_bytes: int | None = None,
        wait_s: float = _WAIT_S,
    ) -> None:
        self.names = tuple(served)
        self.created_s = int(time.time())
        self._served, self._wait_s = dict(served), wait_s
        self._residents = Residents(served, budget_bytes, self._before_unload)
        self._unload_listeners: list[Callable[[], object]] = []

    @property
    def loaded(self) -> Mapping[str, Model]:
        """Those that are there, by name."""
        return self._residents.loaded

    @property
    def status(self) -> str:
        """ "ok" where whoever asks for a model gets it, else "loading", "failed" or "closed"."""
        if self._residents.is_closed:
            return "closed"
        if not self._residents.is_started:
            return "loading"
        runtimes = (m for m in self.loaded.values() if isinstance(m, Runtime))
        return "failed" if any(runtime.closed for runtime in runtimes) else "ok"

    def names_of(self, kind: type[Model]) -> list[str]:
        """Those of a kind, whether or not they are there."""
        return [name for name, served in self._served.items() if served.kind is kind]

    def num_loads(self, name: str) -> int:
        """How often a model was loaded."""
        return self._residents.num_loads(name)

    def when_unloading(self, listener: Callable[[], object]) -> None:
        """Call back, in the event loop, each time before a model is unloaded."""
        self._unload_listeners.append(listener)

    async def load(self) -> None:
        """Load those that fit together; stops early when they are closed meanwhile.

        Raises:
            HeadraceError: as the loaders do. Those before stay loaded.
        """
        await self._residents.start()

    async def close(self) -> None:
        """End what they do and give the memory back; waits for a model that is being loaded."""
        await self._residents.close()

    async def lease(self, name: str | None, kind: type[Model]) -> Lease:
        """The model that a request asks for, once it is there.

        Args:
            name: None for the only one of this kind.

        Raises:
            ApiError: there is no such model (404), it does something else (400), the server
                starts or ends (503), or the model cannot be had in time (503).
        """
        name = self.find(name, kind)
        if not self._residents.is_started and name not in self.loaded:
            raise ApiError(503, f"{name} is being loaded; try again", code="model_loading")
        try:
            async with asyncio.timeout(self._wait_s):
                return await self._residents.lease(name)
        except TimeoutError:
            message = (
                f"{name} could not be had within {self._wait_s:g} s: other models are in use, "
                "and there is no memory for one more; try again later"
            )
            raise ApiError(503, message, code="model_unavailable") from None
        except LoadError as error:
            raise ApiError(503, str(error), code="model_unavailable") from None
        except EngineClosedError as error:
            raise ApiError(503, str(error), code="shutting_down") from None

    def find(self, name: str | None, kind: type[Model]) -> str:
        """The name of the model that a request asks for.

        Raises:
            ApiError: as `lease`, for a wrong name or kind.
        """
        names = self.names_of(kind)
        if name is None:
            if len(names) == 1:
                return names[0]
            problem = f"say which model is meant: {', '.join(names)}"
            if not names:
                problem = f"no model here can {_DOES[kind]}"
            raise ApiError(400, problem, param="model")
        if name not in self.names:
            message = f"there is no model {name!r} here; there is {', '.join(self.names)}"
            raise ApiError(404, message, code="model_not_found", param="model")
        if name not in names:
            raise ApiError(400, f"{name} cannot {_DOES[kind]}", param="model")
        return name

    def _before_unload(self) -> None:
        for listener in self._unload_listeners:
            listener()
