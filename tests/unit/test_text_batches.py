"""Which texts share a call."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.runtime.encoder.batches import call_tokens, plan_calls


@given(st.lists(st.integers(1, 600), min_size=1, max_size=60), st.integers(1, 600))
def test_every_text_is_in_one_call_within_its_bounds(lengths: list[int], room: int) -> None:
    calls = plan_calls(lengths, room)
    assert sorted(i for call in calls for i in call) == list(range(len(lengths)))
    for call in calls:
        tokens = [lengths[i] for i in call]
        assert len(call) == 1 or sum(tokens) <= room
        assert sum(tokens) >= 0.75 * len(tokens) * max(tokens)


def test_neighbours_in_length_share_calls() -> None:
    assert plan_calls([10, 50, 11, 52, 10], 110) == [[3, 1], [2, 0, 4]]


def test_full_calls_where_lengths_allow() -> None:
    assert [len(call) for call in plan_calls([16] * 40, 256)] == [16, 16, 8]


def test_calls_are_for_every_thread_and_not_too_small() -> None:
    assert call_tokens(100, 4) == 128
    assert call_tokens(2000, 4) == 250
    assert call_tokens(100_000, 2) == 512
