"""The comparison with goldens can fail, excuses only listed near-ties, and all are listed."""

from __future__ import annotations

from typing import Any

import pytest
from smollm2 import compare_with_golden, golden, prompts

ENTRY: dict[str, Any] = {
    "name": "entry",
    "token_ids": [5, 6, 7, 8],
    "top2_gaps": [1.0, 0.5, 0.0002, 2.0],
    "ambiguous_steps": [{"step": 2, "runner_up": 9}],
}


@pytest.mark.parametrize(
    ("token_ids", "status", "step"),
    [
        ([5, 6, 7, 8], "PASS", 4),
        ([5, 6, 9, 1], "AMBIGUOUS", 2),
        ([5, 6, 3, 8], "FAIL", 2),  # a near-tie, but not one of its two tokens
        ([5, 9, 7, 8], "FAIL", 1),
        ([5, 6, 7, 9], "FAIL", 3),
        ([5, 6, 7], "FAIL", 3),
        ([5, 6], "FAIL", 2),  # the end of an answer is no runner-up
        ([5, 6, 7, 8, 1], "FAIL", 4),
        ([], "FAIL", 0),
    ],
)
def test_first_difference_decides(token_ids: list[int], status: str, step: int) -> None:
    comparison = compare_with_golden(ENTRY, token_ids)
    assert (comparison.status, comparison.step) == (status, step)


def test_golden_file_is_complete() -> None:
    """All tokens of every prompt; every near-tie is listed, and nothing else is."""
    entries = golden()["prompts"]
    assert len(entries) == 20
    assert [entry["name"] for entry in entries] == [prompt["name"] for prompt in prompts()]
    for entry in entries:
        gaps = entry["top2_gaps"]
        assert len(entry["token_ids"]) == len(gaps) == golden()["new_tokens"] == 64
        near_ties = [step for step, gap in enumerate(gaps) if gap < golden()["ambiguous_gap"]]
        assert [near["step"] for near in entry["ambiguous_steps"]] == near_ties
