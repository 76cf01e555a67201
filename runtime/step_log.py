"""What the newest steps were: figures for metrics and measurements, rows for whoever looks on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from headrace.runtime.core import LaneRecord, RowRecord, StepPlan, StepRecord

STEP_LOG_LENGTH = 4096
LANE_LOG_LENGTH = 256  # a record of every row costs some 100 bytes


class StepLog:
    """Written by the engine's thread; copied by any other.

    Attributes:
        steps: the newest, oldest first.
        lanes: who shared the newest of them.
    """

    def __init__(self) -> None:
        self.steps: deque[StepRecord] = deque(maxlen=STEP_LOG_LENGTH)
        self.lanes: deque[LaneRecord] = deque(maxlen=LANE_LOG_LENGTH)

    def add(
        self,
        plan: StepPlan,
        accepted: Sequence[int],
        *,
        model_ms: float,
        total_ms: float,
        draft_ms: float,
        waiting: int,
    ) -> None:
        """Take down a step.

        Args:
            accepted: drafts that were right, by row.
            total_ms: wall time of all of it, model and draft model included.
            waiting: sequences without a slot.
        """
        rows = tuple(
            [
                RowRecord(
                    row.slot,
                    row.seq_id,
                    len(row.tokens),
                    max(row.num_logits - 1, 0),
                    right,
                    row.is_prompt,
                )
                for row, right in zip(plan.rows, accepted, strict=True)
            ]
        )
        drafted = sum([row.drafted for row in rows])
        self.lanes.append(LaneRecord(plan.step_id, time.monotonic(), total_ms, rows))
        self.steps.append(
            StepRecord(
                plan.step_id,
                len(plan.rows),
                plan.num_tokens,
                model_ms,
                total_ms - model_ms - draft_ms,
                waiting,
                drafted,
                sum(accepted),
                draft_ms,
            )
        )
