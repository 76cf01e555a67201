"""Which texts share a call of an encoder. Pure functions of their lengths in tokens."""

from __future__ import annotations

from collections.abc import Sequence

# Tokens of one call: enough for efficient products, few enough for activations to stay in cache.
_MAX_TOKENS, _MIN_TOKENS = 512, 128
_CALLS_PER_THREAD = 2  # at least, so that threads end at about the same time
# Padding that attention may have in a call, as a share of its texts' rectangle.
_MAX_PADDING = 0.25


def call_tokens(total_tokens: int, num_threads: int) -> int:
    """How many tokens a call should hold at most where `num_threads` calls run at once."""
    share = -(-total_tokens // (num_threads * _CALLS_PER_THREAD))
    return min(max(share, _MIN_TOKENS), _MAX_TOKENS)


def plan_calls(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Indices of texts, grouped: the longest first, neighbours in length together.

    A call holds `room` tokens at most, or one text. Padding is what attention computes
    beyond its texts: each is as wide as the longest of its call.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    calls: list[list[int]] = []
    tokens = 0
    for i in order:
        if calls:
            count, longest = len(calls[-1]) + 1, lengths[calls[-1][0]]
            padding = 1 - (tokens + lengths[i]) / (count * longest)
            if tokens + lengths[i] <= room and padding <= _MAX_PADDING:
                calls[-1].append(i)
                tokens += lengths[i]
                continue
        calls.append([i])
        tokens = lengths[i]
    return calls
