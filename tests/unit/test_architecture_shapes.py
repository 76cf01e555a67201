"""Shapes of architectures, large ones without their weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architectures import CONFIGS, config_of, write_model
from safetensors.numpy import load_file, save_file

from headrace.exporters.archs.registry import decoder_spec
from headrace.exporters.archs.spec import DecoderSpec
from headrace.exporters.archs.tensors import expected_tensors
from headrace.exporters.checkpoint.hf_config import normalize_config
from headrace.exporters.checkpoint.source import open_checkpoint
from headrace.exporters.model import checked_spec
from headrace.exporters.rotation import stream_obstacle
from headrace.runtime.errors import CheckpointError

GPT3 = {
    "model_type": "gpt2",
    "vocab_size": 50257,
    "n_positions": 2048,
    "n_embd": 12288,
    "n_layer": 96,
    "n_head": 96,
}


def spec_of(config: dict[str, Any]) -> DecoderSpec:
    return decoder_spec(normalize_config(config, (), Path("config.json")))


def test_gpt3_has_its_175_billion_parameters() -> None:
    """Table 2.1 of Brown et al. (2020); INT8 with a scale a row is a quarter of its float32."""
    spec = spec_of(GPT3)
    assert (spec.head_dim, spec.intermediate_size) == (128, 4 * 12288)
    shapes = [shape for _, shape in expected_tensors(spec)]
    parameters = sum(map(math.prod, shapes))
    layer = 12 * 12288**2 + 13 * 12288
    assert parameters == 96 * layer + (50257 + 2048 + 2) * 12288 == 174_604_259_328
    matrices = [shape for shape in shapes if len(shape) == 2]
    int8_bytes = sum(math.prod(shape) + 4 * shape[-1] for shape in matrices)
    assert 0.249 < int8_bytes / (4 * parameters) < 0.251


@pytest.mark.parametrize("name", CONFIGS)
def test_a_key_that_is_not_known_is_refused_by_every_architecture(name: str) -> None:
    config = config_of(name)
    assert spec_of(config).num_layers == len(spec_of(config).attention)
    with pytest.raises(CheckpointError, match="alibi=True is not known"):
        spec_of({**config, "alibi": True})


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("gemma3", {"layer_types": ["full_attention"]}, "layer_types"),
        ("gemma3", {"layer_types": ["chunked"] * 3}, "chunked"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (
            "gemma3",
            {"rope_parameters": {"full_attention": {}, "sliding_attention": 1}},
            "rope_parameters",
        ),
        ("gemma2", {"hidden_activation": "swoosh"}, "swoosh"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm"),
        ("stablelm", {"partial_rotary_factor": 0.3}, "partial_rotary_factor"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx"),
        ("qwen2_tied_window", {"max_window_layers": "all"}, "max_window_layers"),
        ("mistral", {"sliding_window": -1}, "sliding_window"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
    ],
)
def test_what_is_not_built_is_refused_by_name(
    name: str, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(CheckpointError, match=expected):
        spec_of(config_of(name) | changes)


def test_the_residual_stream_is_rotated_only_where_that_changes_nothing() -> None:
    obstacles = {name for name in CONFIGS if stream_obstacle(spec_of(config_of(name)))}
    kept = ("gemma2", "gemma3", "olmo", "stablelm", "starcoder2", "gpt2")
    assert obstacles == {name for name in CONFIGS if name.startswith(kept)}


@pytest.mark.parametrize("name", ["gpt2", "gemma"])
def test_names_without_the_prefix_of_a_model_with_a_head(name: str, tmp_path: Path) -> None:
    """As the first checkpoints of GPT-2 have them, which hold attention masks, too."""
    folder = write_model(name, tmp_path / "hf")
    with open_checkpoint(folder) as checkpoint:
        expected = set(checkpoint.tensors)
    tensors = {n.split(".", 1)[1]: values for n, values in load_file(file_of(folder)).items()}
    masks = {"h.0.attn.bias": np.ones((1, 1, 8, 8), np.float32)} if name == "gpt2" else {}
    save_file(tensors | masks, file_of(folder))
    with open_checkpoint(folder) as checkpoint:
        checked_spec(checkpoint)
        assert expected == {n for n in checkpoint.tensors if not n.endswith(".attn.bias")}


def file_of(folder: Path) -> Path:
    return folder / "model.safetensors"
