"""PagedAttention of `contrib_ops` against its documentation by hand, and against the CPU kernel of
GroupQueryAttention, which computes the same from another layout of the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from one_node import cpu_kernel, half_steps, normal, reference

Array = NDArray[Any]
HALF = np.float16


def paged(feeds: dict[str, Array | None], **attributes: Any) -> list[Array]:
    names = (
        *("query", "key", "value", "key_cache", "value_cache", "cumulative", "past", "table"),
        *("cos", "sin", "slots", "sink", "query_gain", "key_gain", "key_scale", "value_scale"),
        "metadata",
    )
    return reference(
        "PagedAttention", {name: feeds.get(name) for name in names}, outputs=3, **attributes
    )


def ints(*values: int) -> Array:
    return np.array(values, np.int32)


def test_two_sequences_by_hand() -> None:
    """One head of one channel, blocks of two tokens, four blocks.

    Sequence 0 has past 3 in blocks 2 and 0: keys 0 in slots 4, 5 (block 2) and 0 (block 0), values
    1, 2, 3. It adds one token with key 0 and value 6, which goes to position 3 = block 0, offset 1
    = slot 1. Its query is 5, but all keys are 0, so all four weigh the same: (1 + 2 + 3 + 6) / 4
    = 3.

    Sequence 1 has no past and adds two tokens in block 3 = slots 6, 7, with keys 0 and ln 3 and
    values 8 and 4. Token 0 sees itself: 8. Token 1 with query 1 weighs e^0 : e^(ln 3) = 1 : 3, so
    (8 + 3 * 4) / 4 = 5. Everything else in the cache stays: 9 in the slots that nobody owns.
    """
    key_cache = np.full((4, 2, 1, 1), 9, HALF)
    value_cache = key_cache.copy()
    for slot, value in ((4, 1), (5, 2), (0, 3)):
        key_cache.reshape(-1)[slot] = 0
        value_cache.reshape(-1)[slot] = value
    y, keys, values = paged(
        {
            "query": np.array([[5], [1], [1]], HALF),
            "key": np.array([[0], [0], [np.log(3)]], HALF),
            "value": np.array([[6], [8], [4]], HALF),
            "key_cache": key_cache,
            "value_cache": value_cache,
            "cumulative": ints(0, 1, 3),
            "past": ints(3, 0),
            "table": np.array([[2, 0], [3, -1]], np.int32),
            "slots": ints(1, 6, 7),
        },
        num_heads=1,
        kv_num_heads=1,
        scale=1.0,
    )
    np.testing.assert_allclose(y.ravel(), [3, 8, 5], rtol=1e-3)
    np.testing.assert_array_equal(values.ravel(), [3, 6, 9, 9, 1, 2, 8, 4])
    np.testing.assert_allclose(keys.ravel(), [0, 0, 9, 9, 0, 0, 0, np.log(3)], rtol=1e-3)


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        # Scores of token 2 are 0, 0, ln 2: weights 1 : 1 : 2 of the values 4, 8, 12.
        ({}, (4 + 8 + 2 * 12) / 4),
        # The window holds the token itself and one before: 1 : 2.
        ({"local_window_size": 2}, (8 + 2 * 12) / 3),
        ({"local_window_size": 1}, 12),
        # c tanh(ln 2 / c) with c = ln 2 / artanh(1/2), so that the score is half of c.
        ({"softcap": float(np.log(2) / np.arctanh(0.5))}, None),
    ],
)
def test_window_and_softcap_by_hand(attributes: dict[str, Any], expected: float | None) -> None:
    if expected is None:
        weight = float(np.exp(attributes["softcap"] / 2))
        expected = (4 + 8 + weight * 12) / (2 + weight)
    y, *_ = paged(
        {
            "query": np.array([[1], [1], [1]], HALF),
            "key": np.array([[0], [0], [np.log(2)]], HALF),
            "value": np.array([[4], [8], [12]], HALF),
            "key_cache": np.zeros((1, 4, 1, 1), HALF),
            "value_cache": np.zeros((1, 4, 1, 1), HALF),
            "cumulative": ints(0, 3),
            "past": ints(0),
            "table": np.array([[0]], np.int32),
        },
        num_heads=1,
        kv_num_heads=1,
        scale=1.0,
        **attributes,
    )
    assert y[2, 0] == pytest.approx(expected, rel=1e-3)


def test_a_token_that_maps_nowhere_is_not_written() -> None:
    """Position 1 is in the cache already (a shared prefix), and stays as it is there."""
    cache = np.zeros((1, 4, 1, 1), HALF)
    cache[0, 1] = 7
    _, keys, _ = paged(
        {
            "query": np.ones((2, 3), HALF),
            "key_cache": cache,
            "value_cache": cache.copy(),
            "cumulative": ints(0, 2),
            "past": ints(1),
            "table": np.array([[0]], np.int32),
            "slots": ints(-1, 2),
        },
        num_heads=1,
        kv_num_heads=1,
    )
    np.testing.assert_array_equal(keys.ravel(), [0, 7, 1, 0])


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"local_window_size": 5},
        {"softcap": 3.0},
        {"do_rotary": 1},
        {"do_rotary": 1, "partial": 1, "scale": 0.4},
    ],
    ids=lambda a: "-".join(a) or "plain",
)
def test_it_is_group_query_attention_in_another_layout(attributes: dict[str, Any]) -> None:
    """Packed queries, keys and values of four sequences: past and new, prompt, decode, idle."""
    heads, kv_heads, width, block, capacity = 4, 2, 32, 4, 32
    past, new = [5, 0, 11, 8], [3, 6, 1, 0]
    attributes = dict(attributes)
    turning = width // 2 if attributes.pop("partial", 0) else width
    qkv = normal(sum(new), (heads + 2 * kv_heads) * width)
    rows = normal(4, 2, kv_heads, capacity, width)
    angles = normal(capacity, turning // 2)
    tables = {"cos": np.cos(angles), "sin": np.sin(angles)} if "do_rotary" in attributes else {}

    longest, starts = max(new), np.cumsum([0, *new])
    padded = np.zeros((4, longest, qkv.shape[1]), np.float32)
    for b, count in enumerate(new):
        padded[b, :count] = qkv[starts[b] : starts[b + 1]]
    dense = cpu_kernel(
        "GroupQueryAttention",
        {
            "query": padded,
            "key": None,
            "value": None,
            "past_key": rows[:, 0],
            "past_value": rows[:, 1],
            "seqlens_k": ints(*np.add(past, new) - 1),
            "total": np.array(capacity, np.int32),
            "cos": tables.get("cos"),
            "sin": tables.get("sin"),
            **dict.fromkeys(("positions", "bias", "sink", "ks", "vs", "qn", "kn")),
            "query_seqlens": ints(*new),
        },
        outputs=3,
        num_heads=heads,
        kv_num_heads=kv_heads,
        **attributes,
    )
    expected = np.concatenate([dense[0][b, :count] for b, count in enumerate(new)])

    shuffled = np.random.default_rng(0).permutation(capacity)  # blocks of 4 sequences of 8 each
    table = np.asarray(shuffled.reshape(4, capacity // block), np.int32)
    caches = np.zeros((2, capacity, block, kv_heads, width), np.float32)
    for b in range(4):
        for part in range(2):
            by_token = rows[b, part].transpose(1, 0, 2)
            caches[part, table[b]] = by_token.reshape(-1, block, kv_heads, width)
    halves = {
        name: array.astype(HALF)
        for name, array in {
            "query": qkv,
            "key_cache": caches[0],
            "value_cache": caches[1],
            **tables,
        }.items()
    }
    y, keys, values = paged(
        {
            **halves,
            "cumulative": ints(*starts),
            "past": ints(*past),
            "table": table,
        },
        num_heads=heads,
        kv_num_heads=kv_heads,
        **attributes,
    )
    # Inputs, tables, keys and values are rounded to FP16, and so is the output.
    assert half_steps(y, expected) < 6
    for b in range(4):
        end = past[b] + new[b]
        for cache, present in ((keys, dense[1]), (values, dense[2])):
            by_token = cache[table[b]].reshape(-1, kv_heads, width)[:end]
            assert half_steps(by_token, present[b, :, :end].transpose(1, 0, 2)) < 3


def test_norms_of_heads_come_before_rotation() -> None:
    """Equal to giving normalized queries and keys."""
    heads, kv_heads, width = 2, 1, 16
    qkv = normal(3, 4 * width).astype(HALF)
    gains = [(1 + 0.1 * normal(width + i)[:width]).astype(HALF) for i in range(2)]
    angles = normal(8, width // 2)
    common: dict[str, Array | None] = {
        "cumulative": ints(0, 3),
        "past": ints(2),
        "table": np.array([[1, 0]], np.int32),
        "cos": np.cos(angles).astype(HALF),
        "sin": np.sin(angles).astype(HALF),
    }

    def caches() -> dict[str, Array | None]:
        return {
            name: normal(2, 4, kv_heads, width).astype(HALF)
            for name in ("key_cache", "value_cache")
        }

    options: dict[str, Any] = {"num_heads": heads, "kv_num_heads": kv_heads, "do_rotary": 1}
    by_head = qkv.astype(np.float32).reshape(3, 4, width)
    normed = by_head / np.sqrt(np.square(by_head).mean(-1, keepdims=True) + 1e-6)
    normed[:, :2] *= gains[0]
    normed[:, 2] *= gains[1]
    normed[:, 3] = by_head[:, 3]
    inside, *_ = paged(
        {**common, **caches(), "query": qkv, "query_gain": gains[0], "key_gain": gains[1]},
        qk_norm_epsilon=1e-6,
        **options,
    )
    outside, *_ = paged(
        {**common, **caches(), "query": normed.reshape(3, -1).astype(HALF)}, **options
    )
    assert half_steps(inside, outside) < 3
