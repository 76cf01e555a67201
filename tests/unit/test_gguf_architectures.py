"""GGUF files of every architecture, named by the gguf package, say what the folder says."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from architectures import config_of, write_model
from numpy.typing import NDArray
from safetensors.numpy import load_file

from headrace.exporters.archs.registry import decoder_spec
from headrace.exporters.archs.spec import DecoderSpec
from headrace.exporters.checkpoint.hf_config import normalize_config
from headrace.exporters.checkpoint.source import open_checkpoint
from headrace.exporters.graph.rope import rope_tables
from headrace.runtime.errors import CheckpointError

Metadata = Callable[[gguf.GGUFWriter, Mapping[str, Any]], None]


def _none(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """Nothing beyond what every family has."""


def _yarn(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    scaling = config["rope_scaling"]
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(scaling["factor"])
    writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])


def _gemma(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
    if "final_logit_softcapping" in config:
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _gemma3(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    _gemma(writer, config)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])
    writer.add_rope_freq_base(1000000.0)


def _olmo3(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    _yarn(writer, config)
    writer.add_rope_scaling_attn_factors(config["rope_scaling"]["attention_factor"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_sliding_window(config["sliding_window"])


def _olmo3_layers(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """GGUF has room for one base of rotary positions."""
    scaling = config["rope_parameters"]["full_attention"]
    _yarn(writer, {"rope_scaling": scaling})
    writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])
    writer.add_rope_freq_base(scaling["rope_theta"])
    writer.add_sliding_window(config["sliding_window"])
    kinds = config["layer_types"]
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])


def _granite(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    if "logits_scaling" in config:
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])


def _phi3(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
    if "rope_scaling" in config:
        trained = config["original_max_position_embeddings"]
        factor = config["max_position_embeddings"] / trained
        writer.add_rope_scaling_orig_ctx_len(trained)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(factor) / math.log(trained)))
        writer.add_rope_dimension_count(int(config["head_dim"] * config["partial_rotary_factor"]))
        for kind in ("short", "long"):
            factors = np.array(config["rope_scaling"][f"{kind}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)


def _stablelm(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_parallel_residual(False)
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(int(config.get("partial_rotary_factor", 0.25) * head_dim))


# Name of the sample, GGUF architecture, its own metadata.
CASES: dict[str, tuple[gguf.MODEL_ARCH, Metadata]] = {
    "qwen2": (gguf.MODEL_ARCH.QWEN2, _none),
    "qwen2_yarn": (gguf.MODEL_ARCH.QWEN2, _yarn),
    "qwen3": (gguf.MODEL_ARCH.QWEN3, _none),
    "qwen3_bias_untied": (gguf.MODEL_ARCH.QWEN3, _none),
    "gemma": (gguf.MODEL_ARCH.GEMMA, _none),
    "gemma2": (gguf.MODEL_ARCH.GEMMA2, _gemma),
    "gemma3_old_keys": (gguf.MODEL_ARCH.GEMMA3, _gemma3),
    "olmo2": (gguf.MODEL_ARCH.OLMO2, _none),
    "olmo3": (gguf.MODEL_ARCH.OLMO2, _olmo3),
    "olmo3_listed_layers": (gguf.MODEL_ARCH.OLMO2, _olmo3_layers),
    "granite": (gguf.MODEL_ARCH.GRANITE, _granite),
    "phi3": (gguf.MODEL_ARCH.PHI3, _phi3),
    "phi3_partial_longrope": (gguf.MODEL_ARCH.PHI3, _phi3),
    "stablelm": (gguf.MODEL_ARCH.STABLELM, _stablelm),
    "stablelm_half": (gguf.MODEL_ARCH.STABLELM, _stablelm),
    "stablelm_10_pairs": (gguf.MODEL_ARCH.STABLELM, _stablelm),
    "smollm3": (gguf.MODEL_ARCH.SMOLLM3, _none),
    "starcoder2_untied": (gguf.MODEL_ARCH.STARCODER2, _none),
    "arcee": (gguf.MODEL_ARCH.ARCEE, _none),
    "arcee_bias_yarn": (gguf.MODEL_ARCH.ARCEE, _yarn),
    "seed_oss": (gguf.MODEL_ARCH.SEED_OSS, _none),
    "gpt2": (gguf.MODEL_ARCH.GPT2, _none),
    "gpt2_untied": (gguf.MODEL_ARCH.GPT2, _none),
}
# The converter turns these, and GPT-2's matrices.
_QUERY_AND_KEY = {"q_proj": 4, "k_proj": 2}
INTERLEAVED = dict.fromkeys(("granite", "smollm3", "arcee"), _QUERY_AND_KEY)


def write_gguf(name: str, folder: Path, path: Path, **more: Any) -> Path:
    """Convert a folder as llama.cpp's converter would; `more`: metadata, `__` for `.`."""
    architecture, add_own = CASES[name]
    config = config_of(name)
    said = normalize_config(config, (), folder)
    layers = said["num_hidden_layers"]
    assert isinstance(layers, int)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_context_length(said["max_position_embeddings"])
    writer.add_embedding_length(said["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(decoder_spec(said).intermediate_size)
    writer.add_head_count(said["num_attention_heads"])
    if config["model_type"] in ("gpt2", "stablelm", "starcoder2"):
        writer.add_layer_norm_eps(1e-5)
    else:
        usual = 1e-5 if config["model_type"] in ("phi3", "arcee") else 1e-6
        writer.add_layer_norm_rms_eps(usual)
    if config["model_type"] != "gpt2":
        writer.add_head_count_kv(config["num_key_value_heads"])
    if config["model_type"] not in ("gemma3_text", "olmo3", "gpt2"):
        writer.add_rope_freq_base(10000.0)
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    add_own(writer, config)
    for key, value in more.items():
        writer.add_uint32(key.replace("__", "."), value)
    names = gguf.get_tensor_name_map(architecture, layers)
    for tensor, values in load_file(folder / "model.safetensors").items():
        new = names.get_name(tensor, try_suffixes=(".weight", ".bias"))
        assert new is not None, tensor
        if config["model_type"].startswith("gemma") and values.ndim == 1:
            values = values + np.float32(1)
        if config["model_type"] == "gpt2" and ".h." in tensor and values.ndim == 2:
            values = np.ascontiguousarray(values.T)
        heads = INTERLEAVED.get(config["model_type"], {}).get(tensor.split(".")[-2])
        if heads is not None:  # rows i and i + d/2 of a head become neighbours
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        writer.add_tensor(new, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_same(actual: DecoderSpec, expected: DecoderSpec) -> None:
    """The same decoder, but for what float32 in GGUF cannot say."""
    for field in dataclasses.fields(DecoderSpec):
        one, other = getattr(actual, field.name), getattr(expected, field.name)
        if isinstance(other, float):
            assert one == pytest.approx(other, rel=1e-6), field.name
        elif field.name == "attention":
            assert [a.window_tokens for a in one] == [a.window_tokens for a in other]
            for mine, theirs in zip(actual.ropes, expected.ropes, strict=True):
                tables = [rope_tables(rope, 40) for rope in (mine, theirs)]
                np.testing.assert_allclose(tables[0], tables[1], rtol=1e-5, atol=1e-5)
        else:
            assert one == other, field.name


@pytest.mark.parametrize("name", CASES)
def test_both_formats_say_the_same(name: str, tmp_path: Path) -> None:
    folder = write_model(name, tmp_path / "hf")
    file = write_gguf(name, folder, tmp_path / "model.gguf")
    with open_checkpoint(folder) as expected, open_checkpoint(file) as actual:
        assert_same(decoder_spec(actual.config), decoder_spec(expected.config))
        assert set(actual.tensors) == set(expected.tensors)
        for tensor in expected.tensors:
            values: NDArray[np.float32] = actual.tensors[tensor].load()
            np.testing.assert_allclose(
                values, expected.tensors[tensor].load(), atol=1e-6, err_msg=tensor
            )


def test_metadata_that_nobody_reads_is_refused(tmp_path: Path) -> None:
    folder = write_model("qwen3", tmp_path / "hf")
    file = write_gguf("qwen3", folder, tmp_path / "model.gguf", qwen3__attention__sliding_window=8)
    with pytest.raises(CheckpointError, match=r"'qwen3\.attention\.sliding_window' is not known"):
        open_checkpoint(file)
