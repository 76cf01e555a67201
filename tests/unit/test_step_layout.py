"""Index arrays of packed steps, and KV slots, without a model."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.backends.cpu_avx512.calls import MAX_SCORE_BYTES, plan_calls, split_calls
from headrace.backends.cpu_avx512.kv_storage import KvStorage
from headrace.backends.cpu_avx512.layout import ShapeKey, shape_key, step_indices
from headrace.runtime.core import Row
from headrace.runtime.errors import InsufficientMemoryError


@st.composite
def shapes(draw: st.DrawFn) -> ShapeKey:
    slots = sorted(draw(st.sets(st.integers(0, 12), min_size=1, max_size=6)))
    rows = []
    for slot in slots:
        tokens = draw(st.integers(1, 9))
        rows.append((slot, tokens, draw(st.integers(0, tokens))))
    return tuple(rows)


@given(shapes())
def test_packing_is_undone_by_scatter(key: ShapeKey) -> None:
    """Packed -> padded -> packed is the identity, and padding shows token 0."""
    indices = step_indices(key)
    total = sum(tokens for _, tokens, _ in key)
    packed = np.arange(100, 100 + total)
    padded = packed[indices.gather]
    assert padded.shape[0] == key[-1][0] - key[0][0] + 1
    np.testing.assert_array_equal(padded.reshape(-1)[indices.scatter], packed)


@given(shapes())
def test_rows_are_where_their_slot_is(key: ShapeKey) -> None:
    indices = step_indices(key)
    start = 0
    wanted: list[int] = []
    for slot, tokens, logits in key:
        b = slot - indices.first_slot
        assert indices.query_seqlens[b] == tokens
        assert indices.gather[b, :tokens].tolist() == list(range(start, start + tokens))
        wanted += range(start + tokens - logits, start + tokens)
        start += tokens
    assert indices.logits_index.tolist() == wanted
    assert int(indices.query_seqlens.sum()) == start  # idle slots have none


def test_shape_key_ignores_what_changes_every_step() -> None:
    first = [Row(1, 0, 5, (7,), 1), Row(2, 3, 9, (8, 9), 2)]
    later = [Row(1, 0, 6, (1,), 1), Row(2, 3, 11, (2, 3), 2)]
    assert shape_key(first) == shape_key(later) == ((0, 1, 1), (3, 2, 2))


@st.composite
def steps(draw: st.DrawFn) -> list[Row]:
    slots = sorted(draw(st.sets(st.integers(0, 12), min_size=1, max_size=8)))
    rows = []
    for slot in slots:
        n = draw(st.sampled_from([1, 1, 2, 16, 17, 40, 300]))
        tokens = tuple(range(slot * 1000, slot * 1000 + n))
        past = draw(st.sampled_from([0, 5, 100_000]))
        rows.append(Row(slot, slot, past, tokens, draw(st.integers(0, n))))
    return rows


@given(steps(), st.booleans())
def test_calls_cover_every_token_and_logit_once(rows: list[Row], ragged: bool) -> None:
    calls = plan_calls(rows, ragged=ragged, num_heads=32)
    fed: dict[int, list[int]] = {}
    past = {row.slot: row.past_len for row in rows}
    logits: dict[int, int] = {}
    for call in calls:
        slots = [part.row.slot for part in call]
        assert slots == sorted(set(slots))
        for part in call:
            row = part.row
            assert row.past_len == past[row.slot]  # pieces in order, nothing skipped
            past[row.slot] += len(row.tokens)
            fed.setdefault(row.slot, []).extend(row.tokens)
            for i in range(row.num_logits):
                token = row.tokens[len(row.tokens) - row.num_logits + i]
                assert logits.setdefault(part.first_logit + i, token) == token
    assert fed == {row.slot: list(row.tokens) for row in rows}
    wanted = [t for row in rows for t in row.tokens[len(row.tokens) - row.num_logits :]]
    assert [logits[i] for i in range(len(wanted))] == wanted and len(logits) == len(wanted)


@given(steps())
def test_scores_are_bounded_and_decode_rows_stay_together(rows: list[Row]) -> None:
    calls = plan_calls(rows, ragged=True, num_heads=32)
    for call in calls:
        for part in call:
            n, end = len(part.row.tokens), part.row.past_len + len(part.row.tokens)
            assert n <= 16 or 4 * 32 * n * end <= MAX_SCORE_BYTES
    decoding = {row.slot for row in rows if len(row.tokens) == 1}
    assert sum(any(p.row.slot in decoding for p in call) for call in calls) <= 1


@given(steps())
def test_uniform_calls_have_no_idle_slot(rows: list[Row]) -> None:
    for call in plan_calls(rows, ragged=False, num_heads=32):
        if len(call) > 1:
            first = call[0].row.slot
            assert [part.row.slot for part in call] == list(range(first, first + len(call)))
            assert {len(part.row.tokens) for part in call} == {1}


def storage(**changes: int) -> KvStorage:
    sizes = {"num_layers": 2, "num_kv_heads": 3, "row_elements": 64, "capacity_tokens": 100}
    return KvStorage(**{**sizes, "num_slots": 4, **changes}, dtype=np.dtype(np.int8))  # type: ignore[arg-type]


def test_bound_ranges_are_views_of_the_slots() -> None:
    kv = storage()
    assert kv.capacity_tokens == 128
    whole, part = kv.bind_range(0, 4), kv.bind_range(1, 3)
    assert whole[0].shape() == [4, 3, 128, 64]
    assert len(part) == 2 * 2
    whole[3].numpy()[2, 1, 5, 7] = 42
    assert part[3].numpy()[1, 1, 5, 7] == 42


def test_copy_and_release_touch_only_their_slot() -> None:
    kv = storage()
    rng = np.random.default_rng(0)
    whole = [tensor.numpy() for tensor in kv.bind_range(0, 4)]
    for array in whole:
        array[:] = rng.integers(-128, 128, array.shape)
    before = [array.copy() for array in whole]
    kv.copy(source=1, target=3, num_tokens=17)
    for array, old in zip(whole, before, strict=True):
        np.testing.assert_array_equal(array[3, :, :17], old[1, :, :17])
        np.testing.assert_array_equal(array[3, :, 17:], old[3, :, 17:])
        np.testing.assert_array_equal(array[:3], old[:3])
    kv.release(0)
    for array, old in zip(whole, before, strict=True):
        np.testing.assert_array_equal(array[1:3], old[1:3])


def test_address_space_that_the_system_refuses_is_a_clear_error() -> None:
    with pytest.raises(InsufficientMemoryError, match="max_sequences"):
        storage(num_layers=1 << 20, num_slots=1 << 20)


@given(sizes=st.lists(st.integers(1, 9), max_size=4), count=st.integers(1, 6))
def test_split_calls_hold_the_same_rows(sizes: list[int], count: int) -> None:
    rows = [Row(slot, slot, 0, (1,), 1) for slot in range(sum(sizes))]
    parts = [part for row in rows for part in plan_calls([row], ragged=True, num_heads=1)[0]]
    starts = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    calls = [parts[a:b] for a, b in itertools.pairwise(starts)]
    split = split_calls(calls, count)
    assert [part for call in split for part in call] == parts
    assert len(split) == sum(min(size, count) for size in sizes)
    largest = [max(len(c) for c in split_calls([call], count)) for call in calls]
    assert largest == [-(-size // count) for size in sizes]
