"""Errors of the tokenizers library, mapped at one seam."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headrace.runtime.errors import CheckpointError


@contextmanager
def map_tokenizers_errors(what: str) -> Iterator[None]:
    """Raise `CheckpointError("{what}: {the library's message}")` for whatever the library raises.

    That is the bare `Exception`, or, where its Rust code panics, pyo3's `PanicException`: a
    `BaseException` whose class cannot be imported. Keep the block to calls of the library.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # KeyboardInterrupt and its like
        raise CheckpointError(f"{what}: {' '.join(str(error).split())}") from None
