"""How many drafts each sequence of a step gets: as many as pay.

A step with n tokens takes T(n) ms and yields a token for each sequence and one for each accepted
draft. Drafts are given out in order of their chance of being accepted while tokens per second rise.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

PRIOR_SLOPE = 0.08  # of T(1): what one more token adds, until steps have shown it
_PRIOR_STRENGTH = 8.0  # tokens^2: how much spread in n outweighs the prior
_DECAY = 0.98  # of old steps, a step
_OUTLIER = 1.5  # a step that takes longer than this times what is expected counts as this


class StepCost:
    """T(n) = base_ms + slope_ms * n of decode steps, by least squares over recent ones.

    Steps differ little in n as long as nobody drafts, so the slope is drawn to a prior.
    """

    def __init__(self) -> None:
        self._weight = self._n = self._ms = self._nn = self._nms = 0.0

    def observe(self, num_tokens: int, model_ms: float) -> None:
        if self._weight > 1.0:
            model_ms = min(model_ms, _OUTLIER * self(num_tokens))
        n = float(num_tokens)
        self._weight = self._weight * _DECAY + 1.0
        self._n = self._n * _DECAY + n
        self._ms = self._ms * _DECAY + model_ms
        self._nn = self._nn * _DECAY + n * n
        self._nms = self._nms * _DECAY + n * model_ms

    def __call__(self, num_tokens: float) -> float:
        """Expected ms of a step; before the first in units of a step with one token."""
        if not self._weight:
            return 1.0 + PRIOR_SLOPE * (num_tokens - 1)
        mean_n, mean_ms = self._n / self._weight, self._ms / self._weight
        spread = self._nn / self._weight - mean_n * mean_n
        together = self._nms / self._weight - mean_n * mean_ms
        one_ms = mean_ms / (1.0 + PRIOR_SLOPE * (mean_n - 1.0))
        strength = _PRIOR_STRENGTH / self._weight
        slope = (together + strength * PRIOR_SLOPE * one_ms) / (spread + strength)
        slope = max(slope, 0.0)
        return max(mean_ms + slope * (num_tokens - mean_n), 1e-6)


def draft_lengths(
    cost: StepCost,
    chances: Sequence[Sequence[float]],
    num_others: int = 0,
    spent_ms: float = 0.0,
) -> list[int]:
    """Drafts for each sequence that has some, maximizing the step's expected tokens per ms.

    A draft is worth its chance of being accepted. That falls within a sequence and cost is linear,
    so taking the most valuable next draft until one lowers the speed finds the best of all choices.

    Args:
        chances: of each sequence's drafts, in (0, 1) and falling: that it and those before it are
            accepted.
        num_others: sequences of the step that have none.
        spent_ms: time that the step has taken already.
    """
    lengths = [0] * len(chances)
    queue = [(-own[0], i) for i, own in enumerate(chances) if own]
    heapq.heapify(queue)
    num_tokens = len(chances) + num_others
    expected = float(num_tokens)
    step_ms = spent_ms + cost(num_tokens)
    while queue:
        negative, i = heapq.heappop(queue)
        longer_ms = spent_ms + cost(num_tokens + 1)
        if (expected - negative) * step_ms <= expected * longer_ms:
            break
        expected, step_ms, num_tokens = expected - negative, longer_ms, num_tokens + 1
        lengths[i] += 1
        if lengths[i] < len(chances[i]):
            heapq.heappush(queue, (-chances[i][lengths[i]], i))
    return lengths
