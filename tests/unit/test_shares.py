"""Parts of a decoder: together they are the whole, and no rank has nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.runtime.errors import ConfigError
from headrace.runtime.shares import Span, split_decoder, split_evenly

SMOLLM2 = {"num_heads": 9, "num_kv_heads": 3, "intermediate": 1536, "vocab": 49152}
COUNTS = st.integers(1, 12)


def test_uneven_heads_go_by_whole_groups() -> None:
    first, second = split_decoder("smollm2", **SMOLLM2, ranks=2)
    assert (first.heads, first.kv_heads) == (Span(0, 6), Span(0, 2))
    assert (second.heads, second.kv_heads) == (Span(6, 3), Span(2, 1))
    assert (second.inner, second.tokens) == (Span(768, 768), Span(24576, 24576))


def test_more_ranks_than_kv_heads_repeat_them() -> None:
    shares = split_decoder("m", num_heads=8, num_kv_heads=2, intermediate=256, vocab=300, ranks=4)
    assert [share.kv_heads for share in shares] == [Span(0, 1), Span(0, 1), Span(1, 1), Span(1, 1)]
    assert [share.heads.first for share in shares] == [0, 2, 4, 6]


@given(COUNTS, COUNTS, st.integers(1, 5000), st.integers(1, 300), COUNTS)
def test_parts_are_the_whole(
    num_kv_heads: int, group: int, intermediate: int, vocab: int, ranks: int
) -> None:
    sizes = {"num_kv_heads": num_kv_heads, "intermediate": intermediate, "vocab": vocab}
    try:
        shares = split_decoder("m", num_heads=num_kv_heads * group, **sizes, ranks=ranks)
    except ConfigError:
        repeats = ranks % num_kv_heads == 0 and num_kv_heads * group % ranks == 0
        assert ranks > min(intermediate, vocab) or (ranks > num_kv_heads and not repeats)
        return
    wholes = {"heads": num_kv_heads * group, "inner": intermediate, "tokens": vocab}
    for name, whole in wholes.items():
        spans = [getattr(share, name) for share in shares]
        assert [i for s in spans for i in range(s.first, s.stop)] == list(range(whole))
        assert all(span.size for span in spans)
    for share in shares:  # each query head has its own KV head beside it
        groups = {head // group for head in range(share.heads.first, share.heads.stop)}
        assert groups == set(range(share.kv_heads.first, share.kv_heads.stop))


def test_blocks_stay_whole_where_there_are_enough() -> None:
    assert [span.size for span in split_evenly(11008, 3, 64)] == [3712, 3648, 3648]
    shares = split_decoder("m", num_heads=4, num_kv_heads=4, intermediate=128, vocab=256, ranks=4)
    assert {share.inner.size for share in shares} == {32}


@pytest.mark.parametrize("ranks", [4, 5, 6])
def test_heads_that_cannot_be_split(ranks: int) -> None:
    with pytest.raises(ConfigError, match="splits the 3 KV heads of smollm2"):
        split_decoder("smollm2", **SMOLLM2, ranks=ranks)
