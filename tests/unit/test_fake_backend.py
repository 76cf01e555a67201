from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.backends.fake import FakeBackend, entropy_nats, hashed_logits
from headrace.runtime.core import KvCopy, KvRelease, Row, StepPlan
from headrace.runtime.errors import BackendError


def run(backend: FakeBackend, *rows: Row, ops: tuple[KvCopy | KvRelease, ...] = ()) -> np.ndarray:
    output = backend.collect(backend.submit(StepPlan(0, rows, ops)))
    assert output.logits.dtype == output.entropy_nats.dtype == np.float32
    assert output.entropy_nats.shape == output.logits.shape[:1]
    return output.logits


def test_logits_depend_on_the_whole_prefix_and_nothing_else() -> None:
    backend = FakeBackend()
    run(backend, Row(1, 0, 0, (1, 2), 0), Row(2, 1, 0, (9, 2, 3), 0))
    chunked = run(backend, Row(1, 0, 2, (3,), 1), Row(2, 1, 3, (4,), 1))
    whole = run(FakeBackend(), Row(7, 3, 0, (1, 2, 3), 3))
    np.testing.assert_array_equal(chunked[0], whole[2])
    np.testing.assert_array_equal(chunked[1], hashed_logits(64)([9, 2, 3, 4]))
    assert not np.array_equal(chunked[0], hashed_logits(64)([2, 1, 3]))


def test_smaller_past_takes_tokens_back() -> None:
    backend = FakeBackend()
    run(backend, Row(1, 0, 0, (1, 2, 3, 4), 1))
    np.testing.assert_array_equal(
        run(backend, Row(1, 0, 2, (5,), 1))[0], hashed_logits(64)([1, 2, 5])
    )
    assert backend.held_tokens == 3


def test_copy_and_release() -> None:
    backend = FakeBackend()
    run(backend, Row(1, 0, 0, (1, 2, 3), 1))
    logits = run(backend, Row(2, 1, 2, (3,), 1), ops=(KvCopy(0, 1, 2), KvRelease(0)))
    np.testing.assert_array_equal(logits[0], hashed_logits(64)([1, 2, 3]))
    assert backend.held_tokens == 3
    assert run(backend, ops=(KvRelease(1),)).shape == (0, 64)
    assert backend.held_tokens == 0


@pytest.mark.parametrize(
    ("rows", "ops", "message"),
    [
        ([Row(1, 0, 3, (1,), 1)], (), "more is cached"),
        ([Row(1, 1, 0, (1,), 1), Row(2, 0, 0, (1,), 1)], (), "not ascending"),
        ([Row(1, 0, 0, (1,), 1), Row(2, 0, 0, (1,), 1)], (), "not ascending"),
        ([Row(1, 0, 0, (), 0)], (), "too many or no tokens"),
        ([Row(1, 0, 0, (1,) * 65, 0)], (), "too many or no tokens"),
        ([Row(1, 0, 0, (64,), 0)], (), "vocabulary"),
        ([Row(1, 0, 0, (1,) * 30, 0)], (), "KV budget"),
        ([], (KvCopy(0, 1, 1),), "more than the slot holds"),
    ],
)
def test_wrong_plans_are_refused(
    rows: list[Row], ops: tuple[KvCopy | KvRelease, ...], message: str
) -> None:
    with pytest.raises(BackendError, match=message):
        run(FakeBackend(kv_budget_tokens=29), *rows, ops=ops)


def test_injected_failure_leaves_slots_alone() -> None:
    backend = FakeBackend(fail_at={1})
    run(backend, Row(1, 0, 0, (1, 2), 1))
    with pytest.raises(BackendError, match="injected failure of step 1"):
        run(backend, Row(1, 0, 2, (3,), 1))
    np.testing.assert_array_equal(
        run(backend, Row(1, 0, 2, (3,), 1))[0], hashed_logits(64)([1, 2, 3])
    )


def test_closed_backend_is_closed() -> None:
    backend = FakeBackend()
    backend.close()
    backend.close()
    with pytest.raises(BackendError, match="closed"):
        run(backend, Row(1, 0, 0, (1,), 1))


@given(st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=20))
def test_entropy_is_that_of_softmax(values: list[float]) -> None:
    logits = np.array([values], np.float32)
    p = np.exp(logits.astype(np.float64) - logits.max())
    p /= p.sum()
    expected = -sum(x * np.log(x) for x in p[0] if x > 0)
    assert entropy_nats(logits)[0] == pytest.approx(expected, abs=1e-5)
