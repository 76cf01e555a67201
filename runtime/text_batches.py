"""Which texts share a call of an encoder. Pure functions of their lengths in tokens."""

from __future__ import annotations

from collections.abc import Sequence

# Tokens of one call. Its activations should stay in a core's cache: more is slower.
CALL_TOKENS = 256
# Padding that attention may have in a call, as a share of its texts' rectangle.
_MAX_PADDING = 0.25


def plan_calls(lengths: Sequence[int], call_tokens: int = CALL_TOKENS) -> list[list[int]]:
    """Indices of texts, grouped: the longest first, neighbours in length together.

    A call holds `call_tokens` tokens at most, or one text. Padding is what attention computes
    beyond its texts: each is as wide as the longest of its call.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    calls: list[list[int]] = []
    tokens = 0
    for i in order:
        if calls:
            count, longest = len(calls[-1]) + 1, lengths[calls[-1][0]]
            padding = 1 - (tokens + lengths[i]) / (count * longest)
            if tokens + lengths[i] <= call_tokens and padding <= _MAX_PADDING:
                calls[-1].append(i)
                tokens += lengths[i]
                continue
        calls.append([i])
        tokens = lengths[i]
    return calls
