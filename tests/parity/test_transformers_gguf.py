"""The stored goldens are what transformers makes of the GGUF file today."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from smollm2 import compare_with_golden, golden, prompts, require_checkpoint

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.torch, pytest.mark.model, pytest.mark.slow]

TOOL = Path(__file__).parents[2] / "tools" / "golden.py"
# float32 sums in another order (another CPU, another version) differ by about 6e-5.
LOGIT_TOLERANCE = 3e-4
ENTRIES: dict[str, dict[str, Any]] = {entry["name"]: entry for entry in golden()["prompts"]}


@pytest.fixture(scope="module")
def oracle() -> Any:
    torch.set_num_threads(1)
    return runpy.run_path(str(TOOL))["TransformersOracle"](require_checkpoint())


@pytest.mark.parametrize("prompt", prompts(), ids=list(ENTRIES))
def test_golden_is_reproduced(prompt: dict[str, Any], oracle: Any) -> None:
    stored = ENTRIES[prompt["name"]]
    ids = oracle.encode(prompt)
    assert ids == stored["prompt_ids"]
    fresh = oracle.decode_greedily(ids, golden()["new_tokens"])
    comparison = compare_with_golden(stored, fresh["token_ids"])
    assert comparison.status != "FAIL", comparison.message
    same = slice(comparison.step)  # after it the two decode different texts
    assert fresh["top2_gaps"][same] == pytest.approx(stored["top2_gaps"][same], abs=LOGIT_TOLERANCE)
    first = {i: float.fromhex(value) for i, value in fresh["first_step_top_logits"]}
    for token_id, value in stored["first_step_top_logits"]:
        if token_id in first:  # the tenth may have changed places with the eleventh
            assert first[token_id] == pytest.approx(float.fromhex(value), abs=LOGIT_TOLERANCE)
    assert len(first.keys() & {i for i, _ in stored["first_step_top_logits"]}) >= 9
