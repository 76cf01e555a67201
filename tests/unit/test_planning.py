"""What fits where: sizes against the exporter's shapes and published numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_architecture_shapes import GPT3, spec_of

from headrace.exporters.archs.tensors import expected_tensors
from headrace.runtime import cli
from headrace.runtime.errors import ConfigError
from headrace.runtime.planning.devices import DEVICES, GIB, parse_devices
from headrace.runtime.planning.estimate import PRECISIONS, fit, matrix_bytes, step_ms, weight_bytes
from headrace.runtime.planning.models import MODELS
from headrace.runtime.planning.report import plan_machine, plan_model
from headrace.runtime.planning.shapes import Matrix, ModelShape, Share

FP16, INT8, INT4 = PRECISIONS
A100 = parse_devices("A100-80GB")[1]
# As their makers state them (model cards, index files of the weights).
PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "gemma-3-270m": 268_098_176,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen2.5-7b": 7_615_616_512,
    "mistral-7b-v0.3": 7_248_023_552,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "gpt3-175b": 174_604_259_328,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt3-175b": GPT3,
    "llama-2-70b": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert MODELS[name].parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_shapes_are_those_of_the_exporter(name: str) -> None:
    shapes = [shape for _, shape in expected_tensors(spec_of(CONFIGS[name]))]
    whole = Share(MODELS[name], 0, 1)
    matrices = sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    vectors = sum(shape[0] for shape in shapes if len(shape) == 1)
    assert sum(matrix.elements for matrix in whole.matrices()) == matrices
    assert whole.vector_elements() == vectors


def test_gpt3_between_four_ranks_to_the_byte() -> None:
    """Split, of each tensor of the exporter: columns of c_attn and c_fc with their biases, rows of
    c_proj, and the vocabulary. The first rank adds the biases of c_proj to what the ranks' sums
    come to; the rest is on every rank."""
    for rank in range(4):
        expected = 0
        for name, shape in expected_tensors(spec_of(GPT3)):
            if len(shape) == 1:
                split = name.endswith(("c_attn.bias", "c_fc.bias"))
                summed = name.endswith("c_proj.bias")
                expected += 0 if summed and rank else 4 * shape[0] // (4 if split else 1)
            elif name.endswith("wte.weight"):
                expected += 2 * (12565 if rank == 0 else 12564) * shape[1]
            elif name.endswith("wpe.weight"):
                expected += 2 * math.prod(shape)
            else:
                expected += 2 * math.prod(shape) // 4
        assert weight_bytes(Share(MODELS["gpt3-175b"], rank, 4), 16) == expected


def test_gpt3_on_four_cards() -> None:
    shape = MODELS["gpt3-175b"]
    assert [shape.kv_bytes_per_token(bits) for bits in (16, 8, 4)] == [
        4_718_592,
        2_359_296,
        1_179_648,
    ]
    assert not fit(shape, A100, 4, FP16).fits
    eight = fit(shape, A100, 4, INT8)
    assert eight.fits and eight.kv_bytes_per_token == 2_359_296 // 4
    assert eight.kv_scale_bytes == 4 * 2 * 96 * 24 * 128


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_are_stored_whole(bits: int) -> None:
    assert matrix_bytes(Matrix(3, 64), bits) == 3 * 2 * (32 * bits // 8 + 2)
    assert matrix_bytes(Matrix(3, 65), bits) == 3 * 3 * (32 * bits // 8 + 2)


def possible(shape: ModelShape, ranks: int) -> bool:
    try:
        Share(shape, 0, ranks)
    except ConfigError:
        return False
    return True


@given(st.sampled_from(list(MODELS.values())), st.integers(1, 16))
def test_ranks_together_hold_the_model(shape: ModelShape, ranks: int) -> None:
    if not possible(shape, ranks):
        return
    shares = [Share(shape, rank, ranks) for rank in range(ranks)]
    assert sum(share.heads for share in shares) == shape.num_heads
    assert sum(share.kv_heads for share in shares) == max(shape.num_kv_heads, ranks)
    layer = [sum(m.elements for m in share.products()) for share in shares]
    whole = sum(m.elements for m in Share(shape, 0, 1).products())
    extra = max(ranks - shape.num_kv_heads, 0) * 2 * shape.head_dim * shape.hidden
    assert sum(layer) == whole + shape.num_layers * extra
    assert layer[0] == max(layer)


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="splits the 3 KV heads of smollm2-135m"):
        fit(MODELS["smollm2-135m"], A100, 4, INT8)
    assert [Share(MODELS["smollm2-135m"], r, 2).heads for r in range(2)] == [6, 3]


def test_a_step_takes_longer_with_more_to_do() -> None:
    shape = MODELS["llama-3.1-8b"]
    found = fit(shape, A100, 1, FP16)

    def ms(batch: int, context: int) -> float:
        return step_ms(shape, A100, found, batch=batch, context_tokens=context)

    # One sequence: all weights but the looked-up embedding, read at three quarters of 2,039 GB/s.
    read_bytes = 2 * (8_030_261_248 - 128256 * 4096 - 65 * 4096)
    assert ms(1, 0) == pytest.approx(read_bytes / (0.75 * 2.039e9), rel=1e-3)
    assert ms(1, 0) < ms(1, 4096) < ms(8, 4096)
    alone = fit(shape, A100, 2, FP16)
    both = step_ms(shape, A100, alone, batch=1, context_tokens=0)
    assert ms(1, 0) / 2 < both < ms(1, 0)


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("4xA100-80GB", 4, "A100-80GB"),
        ("a100 80gb", 1, "A100-80GB"),
        ("2 x H100", 2, "H100-80GB"),
        ("RTX 4090", 1, "RTX4090-24GB"),
        ("L4", 1, "L4-24GB"),
        ("L40S", 1, "L40S-48GB"),
    ],
)
def test_devices_by_name(text: str, count: int, name: str) -> None:
    found, device = parse_devices(text)
    assert (found, device.name) == (count, name)


@pytest.mark.parametrize("text", ["", "A100", "0xH100", "RTX", "4x", "1000xH100", "Z80", "x" * 999])
def test_unknown_devices_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 4xA100-80GB"):
        parse_devices(text)


def test_memory_is_below_what_the_name_says() -> None:
    for device in DEVICES:
        nominal = int(device.name.rsplit("-")[-1].removesuffix("GB"))
        assert 0.9 * nominal < device.memory_gib < nominal


def test_a_plan_is_within_memory() -> None:
    for shape in MODELS.values():
        for option in plan_model(shape, A100, 1, None)["options"]:
            used = max(option["weight_bytes"]) + option["activation_bytes"]
            used += option["kv_tokens"] * option["kv_bytes_per_token_and_rank"]
            assert not option["fits"] or used < 79 * GIB
            assert option["fits"] == bool(option["kv_tokens"])


def test_what_a_machine_can_run() -> None:
    plan = plan_machine(MODELS.values(), 8 * GIB, 2048)
    fits = {model["model"]: model["fits"] for model in plan["models"]}
    assert fits["smollm2-135m"] == ["int8", "int4"]
    assert fits["llama-2-13b"] == ["int4"] and fits["llama-2-70b"] == []


def test_the_command(capsys: pytest.CaptureFixture[str], tiny_package: Callable[..., Path]) -> None:
    assert cli.main(["plan", "--model", "gpt3-175b", "--devices", "4xA100-80GB"]) == 0
    printed = capsys.readouterr().out
    assert "fp16             81.37     4,718,592   does not fit" in printed
    assert "Not measured. Assumed: 75% of memory bandwidth" in printed
    assert cli.main(["plan", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["models"]) == len(MODELS)
    package = str(tiny_package("w8a8_row"))
    assert cli.main(["plan", package, "--devices", "H100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["options"][0]["fits"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "lama-2-7b"], "llama-2-7b"),
        (["--devices", "H100"], "expected one, with --devices"),
        (["folder", "--model", "gpt3-175b"], "either a package or the name"),
        (["--model", "gpt3-175b", "--devices", "Z80"], "Z80"),
    ],
)
def test_wrong_usage(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *arguments]) == cli.EXIT_USAGE
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
