"""Which rows of a step go through the graph together.

Every call reads all weights once, so rows share one where they can. But attention works on
`[slots, longest row]` and pays for the padding: beside 15 decode rows a prompt chunk of 256 tokens
takes 354 ms in one call and 250 ms in two (SmolLM2-135M, 2 cores, INT8 cache). So decode and draft
rows go together, and prompt chunks go with others only where little of the rectangle is padding.

Attention also keeps a score for each pair of query and key, so a long chunk of a long sequence is
cut to bound that memory. Rows and pieces do not change each other's results.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from headrace.runtime.core import Row

SHORT_ROW_TOKENS = 16  # a decode row with its drafts
MAX_SCORE_BYTES = 32 << 20
_MAX_AREA = 1.5  # padded positions for each real one


class Part(NamedTuple):
    """A row or a piece of one, and where in the step's logits its own begin."""

    row: Row
    first_logit: int


def plan_calls(rows: Sequence[Row], *, ragged: bool, num_heads: int) -> list[list[Part]]:
    """Split a step into calls; parts of a call are in ascending slot order.

    A graph that is not `ragged` takes one slot with any number of tokens, or neighbouring slots
    with one token each: an idle slot between would be written to.
    """
    short: list[Part] = []
    long: list[Part] = []
    first_logit = 0
    for row in rows:
        if len(row.tokens) <= SHORT_ROW_TOKENS:
            short.append(Part(row, first_logit))
        else:
            long += _pieces(row, first_logit, num_heads)
        first_logit += row.num_logits
    if not ragged:
        return [*_neighbours(short), *([part] for part in long)]
    return [*([short] if short else []), *_rectangles(long)]


def split_calls(calls: Sequence[list[Part]], count: int) -> list[list[Part]]:
    """Each call as up to `count` ones of neighbouring rows, about as many in each."""
    if count == 1:
        return list(calls)
    split = []
    for call in calls:
        bounds = [len(call) * n // count for n in range(count + 1)]
        pairs = itertools.pairwise(bounds)
        split += [call[start:stop] for start, stop in pairs if start < stop]
    return split


def _pieces(row: Row, first_logit: int, num_heads: int) -> Iterator[Part]:
    """The row in order, cut where its scores would take too much memory."""
    end = row.past_len + len(row.tokens)
    size = max(SHORT_ROW_TOKENS, MAX_SCORE_BYTES // (4 * num_heads * end))
    for start in range(0, len(row.tokens), size):
        tokens = row.tokens[start : start + size]
        after = len(row.tokens) - start - len(tokens)
        num_logits = max(0, min(len(tokens), row.num_logits - after))
        piece = row._replace(past_len=row.past_len + start, tokens=tokens, num_logits=num_logits)
        yield Part(piece, first_logit)
        first_logit += num_logits


def _rectangles(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Neighbours join while the rectangle they span is mostly theirs."""
    group: list[Part] = []
    for part in parts:
        if group and not _is_full([*group, part]):
            yield group
            group = []
        group.append(part)
    if group:
        yield group


def _is_full(group: Sequence[Part]) -> bool:
    slots = [part.row.slot for part in group]
    if slots[-1] == slots[-2]:  # pieces of one row come one after the other
        return False
    lengths = [len(part.row.tokens) for part in group]
    return (slots[-1] - slots[0] + 1) * max(lengths) <= _MAX_AREA * sum(lengths)


def _neighbours(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Rows of one token in slots without a gap; any other row alone."""
    group: list[Part] = []
    for part in parts:
        singles = all(len(p.row.tokens) == 1 for p in [part, *group[-1:]])
        if group and not (singles and part.row.slot == group[-1].row.slot + 1):
            yield group
            group = []
        group.append(part)
    if group:
        yield group
