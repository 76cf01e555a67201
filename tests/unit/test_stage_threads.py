"""Calls through stages that are threads: in order, whatever each takes, until one raises."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backends.cpu_avx512.stage_threads import StageThreads
from headrace.runtime.errors import BackendError

WAIT_S = 60.0


class Traced:
    """Notes who ran it; `fail_at` names the stage that raises."""

    def __init__(self, log: list[tuple[int, int]], key: int, fail_at: int | None = None) -> None:
        self.log, self.key, self.fail_at = log, key, fail_at

    def run_stage(self, number: int) -> None:
        if number == self.fail_at:
            raise ValueError(f"stage {number}")
        self.log.append((number, self.key))
        time.sleep(0)


def stage_names() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("headrace-stage")]


@settings(deadline=None, max_examples=25)
@given(num_stages=st.integers(1, 4), num_calls=st.integers(0, 12))
def test_every_stage_has_every_call_in_order(num_stages: int, num_calls: int) -> None:
    threads, log = StageThreads(num_stages), list[tuple[int, int]]()
    started, ended = 0, list[int]()
    while len(ended) < num_calls:
        if started < num_calls and started - len(ended) < threads.max_calls:
            threads.push(Traced(log, started))
            started += 1
        else:
            call = threads.pop()
            assert isinstance(call, Traced)
            assert sorted(n for n, key in log if key == call.key) == list(range(num_stages))
            ended.append(call.key)
    threads.close()
    assert ended == list(range(num_calls))
    for number in range(num_stages):
        assert [key for n, key in log if n == number] == ended


class Meeting:
    """Ends in one stage only when another call is in the other one."""

    def __init__(self, barrier: threading.Barrier, stage: int) -> None:
        self.barrier, self.stage = barrier, stage

    def run_stage(self, number: int) -> None:
        if number == self.stage:
            self.barrier.wait(WAIT_S)


def test_stages_work_at_the_same_time() -> None:
    threads, barrier = StageThreads(2), threading.Barrier(2)
    threads.push(Meeting(barrier, 1))
    threads.push(Meeting(barrier, 0))
    threads.pop()
    threads.pop()
    threads.close()


@pytest.mark.parametrize("fail_at", [0, 1, 2])
def test_a_stage_that_raises_ends_all_with_its_error(fail_at: int) -> None:
    threads, log = StageThreads(3), list[tuple[int, int]]()
    threads.push(Traced(log, 0, fail_at))
    with pytest.raises(ValueError, match=f"stage {fail_at}"):
        threads.pop()
    with pytest.raises(ValueError, match=f"stage {fail_at}"):
        threads.push(Traced(log, 1))
    threads.close()
    assert [n for n, _ in log] == list(range(fail_at)) and not stage_names()


def test_closed_stages_take_nothing() -> None:
    threads = StageThreads(2)
    threads.close()
    threads.close()
    assert not stage_names()
    with pytest.raises(BackendError, match="closed"):
        threads.push(Traced([], 0))
    with pytest.raises(BackendError, match="closed"):
        threads.pop()
