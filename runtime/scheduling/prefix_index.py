"""Which KV slots hold which texts: a radix tree over token ids."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


class _Node:
    """An edge and what lies behind it. `slots`: those whose texts pass the whole edge."""

    __slots__ = ("children", "edge", "slots")

    def __init__(self, edge: Sequence[int], slots: set[int]) -> None:
        self.edge, self.slots = edge, slots
        self.children: dict[int, _Node] = {}

    def split(self, length: int) -> None:
        """Cut the edge in two."""
        rest = _Node(self.edge[length:], set(self.slots))
        rest.children = self.children
        self.edge, self.children = self.edge[:length], {rest.edge[0]: rest}


class PrefixIndex:
    """One text a slot; finds for another text the slots that begin like it."""

    def __init__(self) -> None:
        self._root = _Node((), set())
        self._texts: dict[int, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def insert(self, slot: int, tokens: Sequence[int]) -> None:
        """Note that `slot` holds `tokens`, instead of what it held before."""
        self.remove(slot)
        text = self._texts[slot] = tuple(tokens)
        node, at = self._root, 0
        while at < len(text):
            child = node.children.get(text[at])
            if child is None:
                child = node.children[text[at]] = _Node(text[at:], set())
            else:
                common = common_length(child.edge, text[at:])
                if common < len(child.edge):
                    child.split(common)
            child.slots.add(slot)
            node, at = child, at + len(child.edge)

    def remove(self, slot: int) -> None:
        """Forget a slot, if it is known."""
        text = self._texts.pop(slot, ())
        path, at = [self._root], 0
        while at < len(text):
            path.append(path[-1].children[text[at]])
            at += len(path[-1].edge)
        for node, child in reversed(list(pairwise(path))):
            child.slots.discard(slot)
            if child.slots:
                _join(child)
            else:
                del node.children[child.edge[0]]

    def matches(self, text: Sequence[int]) -> list[tuple[int, int]]:
        """(slot, length of the common prefix) of every slot that shares any, the longest first."""
        tokens = tuple(text)
        found: list[tuple[int, int]] = []
        node, at = self._root, 0
        path: list[tuple[set[int], int]] = []
        while at < len(tokens) and (child := node.children.get(tokens[at])) is not None:
            common = common_length(child.edge, tokens[at:])
            at += common
            path.append((child.slots, at))
            if common < len(child.edge):
                break
            node = child
        seen: set[int] = set()
        for slots, length in reversed(path):
            found += [(slot, length) for slot in sorted(slots - seen)]
            seen |= slots
        return found


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens are the same; by halving, since slices are compared in C."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _join(node: _Node) -> None:
    """Make one edge of two where no text ends or leaves between them."""
    if len(node.children) != 1:
        return
    (child,) = node.children.values()
    if len(child.slots) == len(node.slots):
        node.edge, node.children = (*node.edge, *child.edge), child.children
