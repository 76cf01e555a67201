"""Formats chosen by measurement: `auto`, `int4`, rules, thresholds. On tiny random models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_driver import relative_error
from reference_llama import forward
from tiny import read_folder

from headrace.exporters import calibrate, sensitivity
from headrace.exporters.archs.registry import decoder_spec
from headrace.exporters.graph.linear import Float32, RowInt8Format
from headrace.exporters.model import decoder_parts
from headrace.exporters.package import export_package
from headrace.exporters.package import open_checkpoint as open_source
from headrace.exporters.precision import Rule, find_precision
from headrace.exporters.validate import GraphRunner
from headrace.runtime.errors import ExportError

Maker = Callable[..., Path]
PROMPT = [5, 17, 200, 3, 99, 42, 42, 7]
UNITS_OF_TWO_LAYERS = 1 + 2 * 4  # embedding and head as one; qkv, o, gate and up, down


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "precision_report.json").read_text("utf-8"))
    return report


def formats_of(folder: Path) -> dict[str, str]:
    return {tensor["name"]: tensor["format"] for tensor in report_of(folder)["tensors"]}


@pytest.fixture(autouse=True)
def _little_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested here does not need 4,600 tokens of calibration."""
    monkeypatch.setattr(calibrate, "_NUM_CHUNKS", 4)
    monkeypatch.setattr(calibrate, "_CHUNK_TOKENS", 128)


@pytest.fixture
def export(tiny_checkpoint: Maker, tmp_path: Path) -> Maker:
    def run(**options: object) -> Path:
        folder = tmp_path / "package"
        export_package(tiny_checkpoint(), folder, forms=["uniform"], **options)
        return folder

    return run


def test_auto_stays_with_rows_where_the_threshold_allows(export: Maker) -> None:
    folder = export(precision="auto", quant_threshold=0.9)
    report = report_of(folder)
    assert report["quant_threshold_nats"] == 0.9
    assert report["joint"]["mean_kl_nats"] <= 0.9
    assert report["joint"].keys() >= {"p99_kl_nats", "perplexity", "perplexity_fp32"}
    assert report["matmul_flops_share"]["w8a8_row"] > 0.9
    matrices = [t for t in report["tensors"] if len(t["shape"]) == 2 and t["name"] != "head.matrix"]
    assert all(t["format"] == "w8a8_row" and t["mean_kl_nats"] > 0 for t in matrices)


def test_auto_gives_more_bits_until_the_threshold_is_met(export: Maker) -> None:
    free = report_of(export(precision="auto", quant_threshold=0.9))["joint"]["mean_kl_nats"]
    threshold = free / 3
    folder = export(precision="auto", quant_threshold=threshold, kv_cache="fp32", overwrite=True)
    report = report_of(folder)
    assert 0 < report["joint"]["mean_kl_nats"] <= threshold
    assert len(report["matmul_flops_share"]) > 1


def test_a_threshold_that_cannot_be_met(export: Maker, tmp_path: Path) -> None:
    # The INT8 cache alone costs more, and weights of more bits do not help it.
    impossible = {"precision": "auto", "quant_threshold": 1e-7, "kv_cache": "int8"}
    with pytest.raises(ExportError, match="quant_threshold 1e-07 nats cannot be met") as raised:
        export(**impossible)
    assert re.search(r"the cache adds 0\.0*[1-9].*--kv-cache fp32, or --force", str(raised.value))
    assert list(tmp_path.iterdir()) == []
    assert report_of(export(**impossible, force=True))["joint"]["mean_kl_nats"] > 1e-7
    with pytest.raises(ExportError, match="cannot be met"):  # for any precision
        export(precision="w8a8_row", quant_threshold=1e-7, overwrite=True)


def test_rules_pin_weights_and_the_first_match_wins(export: Maker) -> None:
    rules = [
        Rule("*.layers.1.*.down_proj", "fp32"),
        Rule("*down_proj", "w8a8_block"),
        Rule("*.0.self_attn.k_proj", "w8a8_block"),  # of weights that are stored as one
    ]
    for precision in ("w8a8_row", "auto"):
        folder = export(precision=precision, rules=rules, quant_threshold=0.9, overwrite=True)
        formats = formats_of(folder)
        assert formats["model.layers.1.mlp.down_proj"] == "fp32"
        assert formats["model.layers.0.mlp.down_proj"] == "w8a8_block/8bit"
        stacked = {n: f for n, f in formats.items() if "k_proj" in n}
        assert list(stacked.values()) == ["w8a8_block/8bit", "w8a8_row"]
        assert formats["model.layers.0.self_attn.o_proj"] == "w8a8_row"


def test_int4_keeps_the_most_sensitive_weights_at_int8(export: Maker) -> None:
    folder = export(precision="int4", kv_cache="fp32")
    report = report_of(folder)
    formats = formats_of(folder)
    assert formats["model.embed_tokens"] == "w8a8_row"
    layers = [t for t in report["tensors"] if ".layers." in t["name"] and len(t["shape"]) == 2]
    kinds = {t["format"] for t in layers}
    assert kinds == {"w8a8_row", "w4a8_block64/4bit"}
    size = {kind: sum(np.prod(t["shape"]) for t in layers if t["format"] == kind) for kind in kinds}
    assert size["w8a8_row"] <= 0.2 * sum(size.values())


@pytest.mark.parametrize("tied", [True, False])
def test_sensitivity_is_that_of_a_package_with_one_weight_quantized(
    tied: bool, tiny_checkpoint: Maker, tmp_path: Path
) -> None:
    """The slow twin: an export of its own, with rules."""
    source = tiny_checkpoint(tied=tied)
    with open_source(source) as checkpoint:
        spec = decoder_spec(checkpoint.config)
        parts = decoder_parts(spec, checkpoint.tensors, find_precision("auto"))
        costs = sensitivity.measure_sensitivity(
            parts, Float32(), lambda name: RowInt8Format(), PROMPT, tmp_path
        )
    assert len(costs) == UNITS_OF_TWO_LAYERS + (not tied)
    name = "model.layers.1.mlp.down_proj"
    assert costs[name].shape == (64, 128)
    export_package(
        source,
        tmp_path / "one",
        precision="w8a8_row",
        kv_cache="fp32",
        calibrate=False,
        forms=["uniform"],
        rules=[Rule(name, "w8a8_row"), Rule("*", "fp32")],
    )
    export_package(source, tmp_path / "none", precision="fp32", forms=["uniform"])
    one, none = (
        GraphRunner(next((tmp_path / n).glob("*/uniform.onnx")), 64).run(PROMPT)
        for n in ("one", "none")
    )
    expected = sensitivity.mean_kl_nats(sensitivity.log_softmax(none), sensitivity.log_softmax(one))
    assert costs[name].nats == pytest.approx(expected, rel=0.05)
    assert costs[name].nats > 0


@pytest.mark.parametrize(
    "options", [{}, {"tied": False}, {"bias": True}, {"hidden": 80, "heads": 5, "kv_heads": 1}]
)
def test_the_rotated_model_is_the_model(
    options: dict[str, Any], tiny_checkpoint: Maker, tmp_path: Path
) -> None:
    """Residual stream and value heads in another basis, all in float32."""
    source = tiny_checkpoint(**options)
    export_package(
        source,
        tmp_path / "package",
        precision="w8a8_row",
        kv_cache="fp32",
        calibrate=False,
        forms=["uniform"],
        rules=[Rule("*", "fp32")],
    )
    runner = GraphRunner(tmp_path / "package" / "cpu_int8" / "uniform.onnx", 64)
    expected = forward(*read_folder(source), PROMPT)
    assert relative_error(runner.run(PROMPT), expected) < 1e-3 / 5
