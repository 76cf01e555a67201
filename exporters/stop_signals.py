"""Ctrl-C and SIGTERM as exceptions that do not get lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stopping_when_asked() -> Iterator[Callable[[], None]]:
    """SIGINT and SIGTERM end the block as an exception does, so that no temporary folder stays.

    Python drops an exception that a signal raises amid a destructor or a callback from C. The
    function that the block is given raises it again, once it has been asked for.
    """
    asked: list[BaseException] = []

    def raise_asked() -> None:
        if asked:
            raise asked[-1]

    def stop(number: int, _: object) -> None:
        asked.append(KeyboardInterrupt() if number == signal.SIGINT else SystemExit(143))
        raise_asked()

    if threading.current_thread() is not threading.main_thread():
        yield raise_asked
        return
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
        numbers.append(signal.SIGINT)
    previous = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield raise_asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
