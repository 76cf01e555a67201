"""The radix tree against a comparison with every text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.runtime.scheduling.prefix_index import PrefixIndex, common_length

texts = st.lists(st.integers(0, 2), max_size=12)


@given(texts, texts)
def test_common_length(one: list[int], other: list[int]) -> None:
    expected = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        expected += 1
    assert common_length(one, other) == common_length(tuple(other), tuple(one)) == expected


@given(st.lists(st.tuples(st.integers(0, 4), st.none() | texts), max_size=30), texts)
def test_finds_what_a_scan_finds(
    actions: list[tuple[int, list[int] | None]], wanted: list[int]
) -> None:
    index, held = PrefixIndex(), dict[int, list[int]]()
    for slot, text in actions:
        if text is None:
            index.remove(slot)
            held.pop(slot, None)
        else:
            index.insert(slot, text)
            held[slot] = text
        found = index.matches(wanted)
        scanned = {slot: common_length(text, wanted) for slot, text in held.items()}
        assert dict(found) == {slot: length for slot, length in scanned.items() if length}
        assert [length for _, length in found] == sorted((n for _, n in found), reverse=True)
    assert len(index) == len(held)


def test_forgetting_leaves_nothing_behind() -> None:
    """Texts that come and go beside one that stays do not leave it in pieces."""
    index = PrefixIndex()
    index.insert(0, range(1000))
    for length in range(1, 1000):
        index.insert(1, [*range(length), -1])
    index.remove(1)
    (edge,) = index._root.children.values()
    assert len(edge.edge) == 1000 and not edge.children
