"""ONNX Runtime sessions: how they are made, and the one place where its errors are mapped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.backends.ort_import import load_onnxruntime
from headrace.runtime.errors import BackendError, InsufficientMemoryError, PackageError

_shares_threads = False  # of this process: ONNX Runtime has one pool for all, or each its own
_OUT_OF_MEMORY = ("failed to allocate memory", "bad_alloc", "out of memory")


@contextmanager
def map_ort_errors(doing: str) -> Iterator[None]:
    """Turn what ONNX Runtime raises into the tree of `runtime.errors`.

    Raises:
        InsufficientMemoryError: an allocation failed.
        PackageError: the graph or its weights cannot be read.
        BackendError: anything else.
    """
    try:
        yield
    except MemoryError:
        raise InsufficientMemoryError(0, 0, f"ran out of memory while {doing}") from None
    except Exception as error:
        state = load_onnxruntime().capi.onnxruntime_pybind11_state
        unreadable = (state.NoSuchFile, state.InvalidProtobuf, state.InvalidGraph, state.NoModel)
        foreign = (state.Fail, state.RuntimeException, state.InvalidArgument, state.NotImplemented)
        if isinstance(error, unreadable):
            reason = f"{doing}: the graph cannot be read: {_first_line(error)}"
            raise PackageError(reason) from error
        if not isinstance(error, (*foreign, RuntimeError, ValueError)):
            raise
        text = str(error).lower()
        if any(mark in text for mark in _OUT_OF_MEMORY):
            raise BackendError(
                f"out of memory while {doing}; use fewer or shorter sequences"
            ) from error
        raise BackendError(f"{doing} failed: {_first_line(error)}") from error


def share_threads(num_threads: int) -> None:
    """Have all sessions of this process share threads, of which each would have its own otherwise.

    Once, before the first session. Sessions that run at the same time are in each other's way less,
    and one that runs alone is no slower (docs/measurements.md).
    """
    global _shares_threads
    load_onnxruntime().set_global_thread_pool_sizes(num_threads, 1)
    _shares_threads = True


def set_threads(options: Any, num_threads: int) -> None:
    """Give a session threads of its own, or those that `share_threads` has made.

    Args:
        num_threads: 0 for as many as ONNX Runtime likes.
    """
    if _shares_threads:
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads = num_threads
        options.inter_op_num_threads = 1


def cpu_session(graph: Path, num_threads: int, entries: Mapping[str, str]) -> Any:
    """An `InferenceSession` on the CPU with threads as of `set_threads`.

    `entries` are session configuration entries. Threads wait for the next step by spinning, for
    40 ms at most: without it a step takes up to 1.3x, and an idle runtime uses no CPU.
    """
    try:
        str(graph).encode("utf-8")
    except UnicodeEncodeError:
        raise PackageError(f"{str(graph)!a} is no UTF-8 path; move the package") from None
    ort = load_onnxruntime()
    options = ort.SessionOptions()
    set_threads(options, num_threads)
    # It would keep a plan for each shape that it ever ran: 60 MB, and no faster.
    options.enable_mem_pattern = False
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 4  # errors are raised; the library prints nothing
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    with map_ort_errors(f"loading {graph}"):
        return ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])


def shrinking() -> Any:
    """Options of a run after which its session keeps no memory but that of its weights.

    A session has an arena that keeps what the largest run took, and doubles what it asks for.
    """
    options = load_onnxruntime().RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
