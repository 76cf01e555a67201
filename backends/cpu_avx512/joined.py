"""What the calls of a step say, put together in the order of the step's rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Probabilities, StepOutput
from headrace.backends.cpu_avx512.calls import Part


class JoinedOutput:
    """Copies the outputs of calls, which are overwritten by the next ones.

    Args:
        logits: where they go, float32 [num_logits, vocab].
        probabilities: where they go; None where none are wanted.
        hidden_size: of the hidden states; 0 where there are none.
    """

    def __init__(
        self,
        logits: NDArray[np.float32],
        probabilities: Probabilities | None,
        hidden_size: int,
    ) -> None:
        self._logits, self._probabilities = logits, probabilities
        self._entropy = np.empty(len(logits), np.float32)
        self._hidden = np.empty((len(logits), hidden_size), np.float32) if hidden_size else None

    def take(self, call: Sequence[Part], output: StepOutput) -> None:
        """`output`: of these parts, one after the other."""
        done = 0
        for part in call:
            here = slice(part.first_logit, part.first_logit + part.row.num_logits)
            there = slice(done, done + part.row.num_logits)
            self._logits[here] = output.logits[there]
            self._entropy[here] = output.entropy_nats[there]
            if self._probabilities is not None and output.probabilities is not None:
                self._probabilities.assign(here, output.probabilities.rows(there))
            if self._hidden is not None and output.hidden is not None:
                self._hidden[here] = output.hidden[there]
            done = there.stop

    def whole(self, model_ms: float) -> StepOutput:
        """When every call was taken."""
        return StepOutput(
            self._logits, self._entropy, model_ms, self._probabilities, (), self._hidden
        )
