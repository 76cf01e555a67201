"""What is trained is what is exported: the torch decoder against graphs and against formats."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import architectures
import numpy as np
import onnx_ir as ir
import pytest

from headrace.exporters.checkpoint.source import open_checkpoint
from headrace.exporters.graph.decoder import DecoderParts, build_decoder
from headrace.exporters.graph.mixed import MixedFormat
from headrace.exporters.graph.weights import WeightStore
from headrace.exporters.measured import format_maker
from headrace.exporters.model import checked_spec, decoder_parts
from headrace.exporters.precision import Rule, find_precision, first_match
from headrace.exporters.qat import unknown_parts
from headrace.exporters.validate import GraphRunner

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch

TOKENS = 48
RULES = {
    "fp32": [Rule("*", "fp32")],
    "row INT8": [Rule("*", "w8a8_row")],
    "INT4": [Rule("*embed*", "w8a8_row"), Rule("*", "w4a8_block64")],
    "INT4 with some INT8": [
        Rule("*.0.*.down_proj", "w8a8_row"),  # its inputs are mixed by nodes of their own
        Rule("*.1.*.qkv_proj", "w8a8_row"),
        Rule("*.1.*.o_proj", "w8a8_block"),
        Rule("*embed*", "w8a8_row"),
        Rule("*lm_head*", "w8a8_row"),
        Rule("*", "w4a8_block"),
    ],
    "blocks": [Rule("*", "w8a8_block")],
}
LLAMAS = ({}, {"tied": False}, {"bias": True, "hidden": 80, "heads": 5, "kv_heads": 1})


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("options", LLAMAS)
def test_logits_are_those_of_the_graph(
    rules: str, options: dict[str, Any], tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    check_logits(tiny_checkpoint(**options), rules, tmp_path)


@pytest.mark.parametrize("name", architectures.CONFIGS)
def test_logits_of_every_architecture_that_can_be_trained(name: str, tmp_path: Path) -> None:
    source = architectures.write_model(name, tmp_path / "source")
    with open_checkpoint(source) as checkpoint:
        if unknown := unknown_parts(checked_spec(checkpoint)):
            pytest.skip(f"cannot be trained: {unknown[0]}")
    check_logits(source, "fp32", tmp_path)
    check_logits(source, "INT4", tmp_path)


def check_logits(source: Path, rules: str, folder: Path) -> None:
    from headrace.exporters.train.decoder import TorchDecoder

    ids = np.random.default_rng(0).integers(3, 250, TOKENS).tolist()

    def format_of(weight: str) -> str:
        rule = first_match(RULES[rules], weight)
        assert rule is not None
        return rule.format

    with open_checkpoint(source) as checkpoint:
        spec = checked_spec(checkpoint)
        plain = decoder_parts(spec, checkpoint.tensors, find_precision("int4"))
        choose = format_maker(format_of)
        fmt = MixedFormat(choose)
        parts = dataclasses.replace(plain, layer_format=fmt, head_format=fmt)
        decoder = TorchDecoder(parts, choose, TOKENS, torch.device("cpu"))
        exact = logits_of_graph(plain, folder / f"{rules} exact", ids)
        expected = logits_of_graph(parts, folder / rules, ids)
    with torch.no_grad():
        logits = decoder.logits(torch.tensor([ids]))[0].numpy()
    # A value half way between two codes may be rounded either way; what the format itself does to
    # logits is many times that.
    error, rounding = (float(np.square(a - expected).mean() ** 0.5) for a in (logits, exact))
    assert error < (1e-4 if rules == "fp32" else 0.1 * rounding)


def logits_of_graph(parts: DecoderParts, folder: Path, ids: list[int]) -> np.ndarray:
    folder.mkdir()
    with WeightStore(folder, "weights.bin") as store:
        ir.save(build_decoder(parts, store, "uniform"), folder / "graph.onnx")
    return GraphRunner(folder / "graph.onnx", 64).run(ids)
