"""The thread that owns an engine. Everybody else talks to it through a queue.

    caller --submit, cancel--> inbox --> engine thread: add, cancel, step --> handle --> caller

The thread blocks in C when there is nothing to do. Callers never touch the engine.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.runtime.answer import Request, StepEvent
from headrace.runtime.completion import Choice, ChoiceBuilder, Completion, TokenDelta
from headrace.runtime.engine import Engine
from headrace.runtime.errors import EngineClosedError, QueueFullError
from headrace.runtime.mailbox import LoopClosedError, Mailbox
from headrace.runtime.pipeline import step_in_order, step_overlapped

if TYPE_CHECKING:
    import asyncio

logger = logging.getLogger(__name__)

Listener = Callable[[TokenDelta | None], None]  # None: the request has ended
T = TypeVar("T")

_REST_AFTER_S = 2.0  # without work; the first step behind a rest takes a little longer

_worker_numbers = itertools.count(1)


class RequestHandle:
    """A request on its way. Made by `Runtime.submit`.

    Iterate over it for the pieces as they come, once and from one thread; `result` waits for the
    whole. Dropping a handle does not cancel its request.
    """

    def __init__(self, worker: Worker, request: Request, streaming: bool) -> None:
        self.request_id = request.request_id
        self.keep_alive: object = None  # whose end would end the request
        self._worker, self._request = worker, request
        self._builders = [ChoiceBuilder(answer.index) for answer in request.answers]
        self._choices: dict[int, Choice] = {}
        self._deltas: queue.SimpleQueue[TokenDelta | None] | None = (
            queue.SimpleQueue() if streaming else None
        )
        self._listener: Listener | None = None
        self._error: Exception | None = None
        self._ended = threading.Event()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def cancel(self) -> None:
        """End the request within a step; nothing for one that has ended. Any thread."""
        if not self._ended.is_set():
            self._worker.cancel(self.request_id)

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end.

        Args:
            timeout: seconds; None waits as long as it takes.

        Raises:
            TimeoutError: it goes on longer; the request is not cancelled.
            HeadraceError: the request failed.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"request {self.request_id} is not done after {timeout} s")
        if self._error is not None:
            raise self._error
        choices = tuple(self._choices[i] for i in range(len(self._builders)))
        return Completion(len(self._request.prompt_ids), choices)

    def __iter__(self) -> Iterator[TokenDelta]:
        assert self._deltas is not None, "this handle was not made for streaming"
        while (delta := self._deltas.get()) is not None:
            yield delta
        self._deltas.put(None)  # for whoever asks again
        if self._error is not None:
            raise self._error

    def _take(self, event: StepEvent) -> bool:
        """Engine thread: note what happened; True at the end of the request."""
        delta = event.delta
        if delta is not None:
            builder = self._builders[delta.index]
            builder.add(delta)
            if delta.finish_reason is not None:
                self._choices[delta.index] = builder.build(delta)
            self._publish(delta)
            if len(self._choices) < len(self._builders):
                return False
        self._error = event.error
        self._ended.set()
        self._publish(None)
        return True

    def _publish(self, item: TokenDelta | None) -> None:
        if self._deltas is not None:
            self._deltas.put(item)
        if self._listener is None:
            return
        try:
            self._listener(item)
        except Exception as error:
            if not isinstance(error, LoopClosedError):  # else whoever listened has left: no fault
                logger.warning("a listener failed; its request is cancelled", exc_info=True)
            self._listener = None
            self._worker.cancel(self.request_id)


class Errand:
    """A function to call on the engine's thread, and where what it returns or raises goes."""

    def __init__(self, function: Callable[[Engine], Any], result: Future[Any]) -> None:
        self._function, self.result = function, result

    def run(self, engine: Engine) -> None:
        try:
            value = self._function(engine)
        except Exception as error:
            self.result.set_exception(error)
        else:
            self.result.set_result(value)


class Worker:
    """Runs an engine on a thread of its own.

    Args:
        engine: not to be touched by anybody else from now on, except `prepare`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._max_waiting = engine.config.max_waiting
        # Requests to add, the id of one to cancel, an errand, or None to stop. Its put is
        # reentrant, so that a finalizer may close.
        self._inbox: queue.SimpleQueue[list[RequestHandle] | int | Errand | None] = (
            queue.SimpleQueue()
        )
        self._handles: dict[int, RequestHandle] = {}  # engine thread only
        self._is_rested = True  # there was no step since the engine did; engine thread only
        self._num_added = 0  # answers taken from the inbox; engine thread only
        # Guards what follows. `_room`: answers that may still be submitted.
        self._lock = threading.Lock()
        self._num_submitted = 0
        self._room = self._max_waiting + engine.num_free_slots
        self._room_listeners: list[Callable[[], None]] = []
        self._closed_by: Exception | None = None
        self._mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = (
            weakref.WeakKeyDictionary()
        )
        name = f"headrace-engine-{next(_worker_numbers)}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def closed_by(self) -> Exception | None:
        """Why nothing more is taken; None while open."""
        return self._closed_by

    def submit(
        self,
        request: Request,
        *,
        streaming: bool = False,
        listener: Listener | None = None,
    ) -> RequestHandle:
        """Hand a prepared request to the engine. Any thread.

        Args:
            streaming: whether the handle will be iterated over.
            listener: called on the engine thread with each delta, and with None at the end.

        Raises:
            QueueFullError: `max_waiting` is reached.
            EngineClosedError: closed, or stopped by an error.
        """
        handle = RequestHandle(self, request, streaming)
        handle._listener = listener
        self._put([handle])
        return handle

    def submit_many(
        self, requests: Sequence[Request], listeners: Iterable[Listener | None] | None = None
    ) -> list[RequestHandle]:
        """Hand over the first of these requests, as many as there is room for, all at once: none
        of them waits for another's first steps. Any thread.

        Args:
            listeners: one for each request, as of `submit`.

        Raises:
            QueueFullError: there is no room for any.
            EngineClosedError: closed, or stopped by an error.
        """
        handles = [RequestHandle(self, request, False) for request in requests]
        for handle, listener in zip(handles, listeners or (), strict=False):
            handle._listener = listener
        return handles[: self._put(handles)]

    def _put(self, handles: list[RequestHandle]) -> int:
        """Queue the first of these, at least one; how many."""
        with self._lock:
            if self._closed_by is not None:
                raise _closed_error(self._closed_by)
            taken = 0
            while taken < len(handles) and self._room > 0:
                num_answers = len(handles[taken]._request.answers)
                self._room -= num_answers
                self._num_submitted += num_answers
                taken += 1
            if not taken:
                raise QueueFullError(
                    f"{self._max_waiting} requests are waiting already (max_waiting); "
                    "try again later"
                )
            self._inbox.put(handles[:taken])
        return taken

    def cancel(self, request_id: int) -> None:
        """End a request within a step; nothing for one that has ended. Any thread."""
        self._inbox.put(request_id)

    def run(self, errand: Callable[[Engine], T]) -> Future[T]:
        """Have something done with the engine between two steps, on its thread. Any thread.

        Raises:
            EngineClosedError: closed, or stopped by an error.
        """
        result: Future[T] = Future()
        with self._lock:
            if self._closed_by is not None:
                raise _closed_error(self._closed_by)
            self._inbox.put(Errand(errand, result))
        return result

    def when_room(self, callback: Callable[[], None]) -> None:
        """Call back once `submit` may succeed or the worker has closed; on any thread."""
        with self._lock:
            if self._room <= 0 and self._closed_by is None:
                self._room_listeners.append(callback)
                return
        callback()

    def mailbox(self, loop: asyncio.AbstractEventLoop) -> Mailbox:
        """Where the engine thread posts news for a loop: the same for all of its requests."""
        with self._lock:
            if loop not in self._mailboxes:
                self._mailboxes[loop] = Mailbox(loop)
            return self._mailboxes[loop]

    def close(self, timeout: float | None = None) -> None:
        """Fail what is not finished and wait for the thread to end. Any thread, any time."""
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        reason: Exception | None = None
        try:
            is_overlapped = self._engine.config.pipeline_depth > 1
            step = step_overlapped if is_overlapped else step_in_order
            while self._apply_inbox():
                self._is_rested = not self._engine.has_work
                if self._is_rested:
                    self._deliver(self._engine.rest())
                else:
                    step(self._engine, self._deliver)
                if self._engine.closed_by is not None:
                    break
        except BaseException as error:  # our own mistake: nobody must wait for ever for it
            logger.exception("the engine stopped")
            reason = _closed_error(error)
        self._shut(reason)

    def _apply_inbox(self) -> bool:
        """Carry out what callers asked for; waits if there is nothing else to do, until the engine
        is to rest."""
        engine, inbox = self._engine, self._inbox
        while not inbox.empty() or not engine.has_work:
            try:
                command = inbox.get(timeout=None if self._is_rested else _REST_AFTER_S)
            except queue.Empty:
                return True
            if command is None:
                return False
            if isinstance(command, list):
                for new in command:
                    self._handles[new.request_id] = new
                    engine.add(new._request)
                    self._num_added += len(new._request.answers)
            elif isinstance(command, Errand):
                command.run(engine)
            elif handle := self._handles.get(command):
                self._deliver(engine.cancel(handle._request))
        return True

    def _deliver(self, events: Iterable[StepEvent]) -> None:
        self._update_room()  # first: whoever hears of an end may submit the next
        for event in events:
            handle = self._handles.get(event.request.request_id)
            if handle is not None and handle._take(event):
                del self._handles[handle.request_id]

    def _update_room(self) -> None:
        """As many answers as may wait or have a slot now, less those still in the inbox."""
        engine = self._engine
        room = self._max_waiting + engine.num_free_slots - engine.num_waiting + self._num_added
        listeners: list[Callable[[], None]] = []
        with self._lock:
            self._room = room - self._num_submitted
            if self._room > 0 and self._room_listeners:
                listeners, self._room_listeners = self._room_listeners, listeners
        _call_all(listeners)

    def _shut(self, reason: Exception | None) -> None:
        """Last act of the thread: nobody is left waiting, whatever happened."""
        engine = self._engine
        try:
            self._deliver(engine.close(reason))
        except Exception:
            logger.exception("closing the backend failed")
        error = reason or engine.closed_by or EngineClosedError("the runtime was closed")
        with self._lock:  # from here on `submit` refuses, so the inbox only shrinks
            self._closed_by = error
            listeners, self._room_listeners = self._room_listeners, []
        while not self._inbox.empty():
            command = self._inbox.get()
            if isinstance(command, list):
                self._handles |= {handle.request_id: handle for handle in command}
            elif isinstance(command, Errand):
                command.result.set_exception(_closed_error(error))
        unheard = [handle._request for handle in self._handles.values()]
        self._deliver([StepEvent(request, None, _closed_error(error)) for request in unheard])
        _call_all(listeners)


def _closed_error(cause: BaseException) -> EngineClosedError:
    if isinstance(cause, EngineClosedError):
        return EngineClosedError(str(cause))
    error = EngineClosedError(f"the runtime stopped after an error: {cause}")
    error.__cause__ = cause
    return error


def _call_all(callbacks: list[Callable[[], None]]) -> None:
    for callback in callbacks:
        try:
            callback()
        except Exception:
            logger.warning("a listener for room failed", exc_info=True)
