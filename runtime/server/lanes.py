"""A live view of what a model does: which sequences share its steps.

It is for a person who looks at it, so it is asked for over and over by every page that is open:
an answer holds the newest steps at most, and all askers together get so many answers a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from headrace.runtime.api import Runtime
from headrace.runtime.core import LaneRecord
from headrace.runtime.server.models import Models
from headrace.runtime.server.problems import ApiError

ANSWERS_PER_S = 40.0
_STEPS_PER_LOAD = 2**32  # a model that is loaded again counts from 0; what is told goes on


class LiveView:
    """Answers to `GET /lanes`.

    Args:
        clock: seconds, as `LaneRecord.end_s`.
    """

    def __init__(self, models: Models, clock: Callable[[], float] = time.monotonic) -> None:
        self._models, self._clock = models, clock
        self._ration = Ration(ANSWERS_PER_S, clock)
        self._process = psutil.Process()

    def read(self, model: str | None, after: str | None) -> dict[str, Any]:
        """What a model does, with its newest steps.

        Args:
            model: None for the first that generates text.
            after: a step's id; only later ones are told.

        Raises:
            ApiError: asked too often (429), no such model (404), or wrong arguments (400).
        """
        self._ration.take()
        after_id = _step_id(after)
        names = self._models.names_of(Runtime)
        found: dict[str, Any] = {
            "status": self._models.status,
            "models": names,
            "memory_bytes": self._process.memory_info().rss,
            "now_s": self._clock(),
        }
        if model is None and not names:
            return found
        name = self._models.find(model or names[0], Runtime)
        runtime = self._models.loaded.get(name)
        if not isinstance(runtime, Runtime):
            return {**found, "model": name}
        first_id = (self._models.num_loads(name) - 1) * _STEPS_PER_LOAD
        running, waiting = runtime.occupancy
        caps = runtime.capabilities
        return {
            **found,
            "model": name,
            "context_tokens": caps.context_tokens,
            "slots": caps.max_slots,
            "running": running,
            "waiting": waiting,
            "steps": [_step(lane, first_id) for lane in _later(runtime.lanes, after_id - first_id)],
        }


class Ration:
    """So many a second, for everybody together; a second's worth can be had at once.

    Args:
        clock: seconds from anywhere, never going back.
    """

    def __init__(self, per_s: float, clock: Callable[[], float]) -> None:
        self._per_s, self._clock = per_s, clock
        self._left, self._last_s = per_s, clock()

    def take(self) -> None:
        """Raises ApiError (429) where none is left."""
        now_s = self._clock()
        self._left = min(self._left + (now_s - self._last_s) * self._per_s, self._per_s)
        self._last_s = now_s
        if self._left < 1.0:
            message = f"this is answered {self._per_s:g} times a second at most; try again later"
            raise ApiError(429, message, code="rate_limit_exceeded")
        self._left -= 1.0


def _later(lanes: Sequence[LaneRecord], after_id: int) -> Sequence[LaneRecord]:
    return [lane for lane in lanes if lane.step_id > after_id and lane.rows]


def _step(lane: LaneRecord, first_id: int) -> dict[str, Any]:
    return {
        "id": first_id + lane.step_id,
        "end_s": round(lane.end_s, 4),
        "ms": round(lane.step_ms, 2),
        "rows": [[*row[:-1], int(row.is_prompt)] for row in lane.rows],
    }


def _step_id(text: str | None) -> int:
    if text is None:
        return -1
    digits = text.removeprefix("-")
    if not digits.isascii() or not digits.isdigit() or len(text) > 18:
        raise ApiError(400, f"after is {text[:20]!r}, but should be a step's id", param="after")
    return int(text)
