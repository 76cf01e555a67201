"""What quantization costs the real model: the report of the default package, and a text that its
calibration has not seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.runtime.commands.bench_fidelity import measure_fidelity

pytestmark = pytest.mark.model

HELD_OUT = Path(__file__).parents[1] / "data" / "held_out_wikitext.txt"


@pytest.fixture(scope="module")
def package(smollm2_package: Callable[[str, str], Path]) -> Path:
    return smollm2_package("w8a8_row", "auto")


def test_the_report_of_the_default(package: Path) -> None:
    report = json.loads((package / "precision_report.json").read_text())
    assert report["joint"]["mean_kl_nats"] <= 0.0075
    assert report["kv_cache"]["dtype"] == "int8"
    assert report["kv_cache"]["added"]["mean_kl_nats"] <= 0.005
    assert report["matmul_flops_share"]["w8a8_row"] >= 0.98


def test_fidelity_on_held_out_text(
    package: Path, smollm2_package: Callable[[str, str], Path]
) -> None:
    reference = smollm2_package("fp32", "fp32")
    found = measure_fidelity(package, reference, HELD_OUT, text_tokens=8192)["text"]
    assert found["num_tokens"] >= 8000  # perplexity is known to 0.1% then
    assert found["perplexity"] <= 1.0075 * found["perplexity_fp32"]
    assert found["mean_kl_nats"] <= 0.0075
    assert found["top1_agreement"] > 0.93
