"""Hugging Face folders: shards, types, configuration of several generations, what is missing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pickle
import tracemalloc
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoint_samples import (
    HEAD_DIM,
    HEADS,
    byte_level_tokenizer,
    hf_config,
    hf_tensors,
    write_folder,
    write_gguf,
)
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing

from headrace.exporters.archs.registry import decoder_spec
from headrace.exporters.archs.spec import RopeSpec
from headrace.exporters.checkpoint import safetensors as reader
from headrace.exporters.checkpoint.source import open_checkpoint
from headrace.runtime.errors import CheckpointError

EMBED = "model.embed_tokens.weight"


@pytest.mark.parametrize("shards", [1, 3])
def test_folder(tmp_path: Path, shards: int) -> None:
    with open_checkpoint(write_folder(tmp_path, shards=shards)) as checkpoint:
        assert checkpoint.format == "safetensors"
        assert len(checkpoint.weight_files) == shards
        assert set(checkpoint.tensors) == set(hf_tensors())
        for name, expected in hf_tensors().items():
            tensor = checkpoint.tensors[name]
            assert (tensor.name, tensor.shape, tensor.dtype) == (name, expected.shape, "F32")
            np.testing.assert_array_equal(tensor.load(), expected)
            assert tensor.blocks() is None


def test_both_formats_say_the_same(tmp_path: Path) -> None:
    with (
        open_checkpoint(write_folder(tmp_path / "hf")) as folder,
        open_checkpoint(write_gguf(tmp_path / "m.gguf")) as gguf,
    ):
        assert set(folder.tensors) == set(gguf.tensors)
        specs = [
            dataclasses.replace(decoder_spec(checkpoint.config), norm_eps=1e-5)  # float32 in GGUF
            for checkpoint in (folder, gguf)
        ]
        assert specs[0] == specs[1]


def test_single_file_beside_its_config(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights-without-a-suffix")
    with open_checkpoint(tmp_path / "weights-without-a-suffix") as checkpoint:
        assert checkpoint.config["model_type"] == "llama"
        np.testing.assert_array_equal(checkpoint.tensors[EMBED].load(), hf_tensors()[EMBED])


def test_sha256(tmp_path: Path) -> None:
    def digest(data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()

    with open_checkpoint(write_folder(tmp_path / "one")) as one:
        assert one.sha256() == digest((tmp_path / "one/model.safetensors").read_bytes())
    with open_checkpoint(write_folder(tmp_path / "two", shards=2)) as two:
        shards = sorted((tmp_path / "two").glob("*.safetensors"))
        joined = "".join(digest(shard.read_bytes()) for shard in shards)
        assert two.sha256() == digest(joined.encode())


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("chunk_values", [1, 100, 1 << 20])
def test_float_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any, chunk_values: int
) -> None:
    monkeypatch.setattr(reader, "_CHUNK_VALUES", chunk_values)
    weights = _save(tmp_path, {"m": np.linspace(-3, 3, 60).reshape(20, 3).astype(dtype)})
    with open_checkpoint(tmp_path) as checkpoint:
        loaded = checkpoint.tensors["m"].load()
        assert loaded.dtype == np.float32
        np.testing.assert_array_equal(loaded, weights["m"].astype(np.float32))


def test_odd_shapes(tmp_path: Path) -> None:
    shapes: list[tuple[int, ...]] = [(), (0,), (3, 0), (2, 3, 4)]
    weights = _save(tmp_path, {str(s): np.ones(s, np.float32) for s in shapes})
    with open_checkpoint(tmp_path) as checkpoint:
        for name, expected in weights.items():
            np.testing.assert_array_equal(checkpoint.tensors[name].load(), expected)


def test_loading_needs_little_more_than_the_tensor(tmp_path: Path) -> None:
    _save(tmp_path, {"m": np.zeros((4096, 1024), ml_dtypes.bfloat16)})
    with open_checkpoint(tmp_path) as checkpoint:
        tensor = checkpoint.tensors["m"]
        tracemalloc.start()
        try:
            loaded = tensor.load()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert loaded.nbytes < peak < 1.5 * loaded.nbytes


def test_integers_are_no_weights(tmp_path: Path) -> None:
    _save(tmp_path, {"m": np.zeros((2, 2), np.int32)})
    with (
        open_checkpoint(tmp_path) as checkpoint,
        pytest.raises(CheckpointError, match="type I32"),
    ):
        checkpoint.tensors["m"].load()


def test_closed_checkpoint_cannot_load(tmp_path: Path) -> None:
    with open_checkpoint(write_folder(tmp_path)) as checkpoint:
        tensor = checkpoint.tensors[EMBED]
    with pytest.raises(CheckpointError, match="cannot be read"):
        tensor.load()


def test_defaults_of_transformers(tmp_path: Path) -> None:
    config = hf_config()
    for key in ("num_key_value_heads", "rms_norm_eps", "rope_theta", "max_position_embeddings"):
        del config[key]
    config |= {"tie_word_embeddings": None, "head_dim": None}
    with open_checkpoint(write_folder(tmp_path, config=config)) as checkpoint:
        spec = decoder_spec(checkpoint.config)
    assert (spec.num_kv_heads, spec.head_dim) == (HEADS, HEAD_DIM)
    assert (spec.norm_eps, spec.context_tokens) == (1e-6, 2048)
    assert spec.ropes == [RopeSpec(theta=10000.0, dim=HEAD_DIM)]
    assert not (spec.qkv_bias or spec.output_bias or spec.mlp_bias)
    assert spec.tied_embeddings


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}}, None),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, None),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"type": "linear", "factor": 2.0},
        ),
    ],
)
def test_rope_of_any_generation(
    tmp_path: Path, keys: dict[str, Any], scaling: dict[str, Any] | None
) -> None:
    config = hf_config()
    del config["rope_theta"]
    with open_checkpoint(write_folder(tmp_path, config=config | keys)) as checkpoint:
        spec = decoder_spec(checkpoint.config)
    assert spec.ropes == [RopeSpec(theta=5e5, dim=HEAD_DIM, scaling=scaling)]


def test_quantized_for_another_library(tmp_path: Path) -> None:
    config = hf_config() | {"quantization_config": {"quant_method": "gptq"}}
    with pytest.raises(CheckpointError, match="gptq"):
        open_checkpoint(write_folder(tmp_path, config=config))


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("config.json", None, "config.json is missing"),
        ("config.json", "{", "not valid JSON"),
        ("config.json", "[]", "should hold a JSON object"),
        ("config.json", "{}", "no 'model_type'"),
        ("config.json", '"\\ud800' + "[" * 100_000, "not valid JSON"),
        ("model.safetensors", None, r"no \*\.safetensors"),
        ("model.safetensors", "", "not a complete safetensors file"),
    ],
)
def test_damaged_folder(tmp_path: Path, file: str, content: str | None, expected: str) -> None:
    write_folder(tmp_path)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(content)
    with pytest.raises(CheckpointError, match=expected):
        open_checkpoint(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors', which is miss"):
        open_checkpoint(tmp_path)


def test_tensor_missing_from_its_shard_is_named(tmp_path: Path) -> None:
    path = write_folder(tmp_path, shards=2) / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"promises tensor 'lm_head\.weight'"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("file", ["../a.safetensors", "sub/a.safetensors", "..", "", 3, None])
def test_index_that_leaves_its_folder(tmp_path: Path, file: object) -> None:
    folder = write_folder(tmp_path / "model", shards=2)
    (folder / "sub").mkdir()
    for place in (tmp_path, folder / "sub"):
        save_file({"a": np.zeros(1, np.float32)}, place / "a.safetensors")
    index = {"weight_map": {"a": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not a file in its folder"):
        open_checkpoint(folder)


def test_same_tensor_in_two_files_without_index(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    save_file({EMBED: np.zeros((2, 2), np.float32)}, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match="several files"):
        open_checkpoint(tmp_path)


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("opened-the-pickle"),))


@pytest.mark.parametrize("suffix", ["bin", "pt", "pth", "ckpt"])
def test_pickle_is_refused_unopened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    file = folder / f"pytorch_model.{suffix}"
    file.write_bytes(pickle.dumps(_Bomb()))
    for path in (folder, file):
        with pytest.raises(CheckpointError, match=r"can run any code.*convert it to safetensors"):
            open_checkpoint(path)
    assert not Path("opened-the-pickle").exists()


def test_pickle_is_known_by_content(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "zipped.gguf", "w") as archive:
        archive.writestr("data.pkl", pickle.dumps(_Bomb()))
    (tmp_path / "plain.safetensors").write_bytes(pickle.dumps(_Bomb()))
    for name in ("zipped.gguf", "plain.safetensors"):
        with pytest.raises(CheckpointError, match="can run any code"):
            open_checkpoint(tmp_path / name)


def test_pickled_shards_are_refused(tmp_path: Path) -> None:
    index = {"weight_map": {EMBED: "pytorch_model-1.bin"}}
    write_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="can run any code"):
        open_checkpoint(tmp_path)


def test_tokenizer(tmp_path: Path) -> None:
    write_folder(tmp_path)
    settings = {
        "bos_token": "<s>",
        "eos_token": {"content": "<|im_end|>", "special": True},
        "chat_template": [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    generation = {"eos_token_id": [1, 5], "temperature": 0.2}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    with open_checkpoint(tmp_path) as checkpoint:
        source = checkpoint.tokenizer
    assert (source.bos_token_id, source.eos_token_ids, source.add_bos) == (0, (1, 5), False)
    assert source.chat_template == "D"
    assert source.generation_config == generation
    assert Tokenizer.from_str(source.tokenizer_json).encode("he").tokens == ["he"]
    (tmp_path / "chat_template.jinja").write_text("J")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.tokenizer.chat_template == "J"


def test_tokenizer_that_pads_truncates_and_adds_bos(tmp_path: Path) -> None:
    write_folder(tmp_path)
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_padding(length=16)
    tokenizer.enable_truncation(4)
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with open_checkpoint(tmp_path) as checkpoint:
        source = checkpoint.tokenizer
    assert (source.bos_token_id, source.add_bos) == (0, True)
    again = Tokenizer.from_str(source.tokenizer_json)
    assert len(again.encode("abcdefghij", add_special_tokens=False).ids) == 10


def test_tokenizer_that_adds_more_than_bos(tmp_path: Path) -> None:
    write_folder(tmp_path)
    tokenizer = byte_level_tokenizer()
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A <|im_end|>", special_tokens=[("<s>", 0), ("<|im_end|>", 1)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with (
        open_checkpoint(tmp_path) as checkpoint,
        pytest.raises(CheckpointError, match="more than one token"),
    ):
        _ = checkpoint.tokenizer


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, r"no tokenizer\.json; add it"),
        ("{}", "not a valid tokenizer"),
        ("not json", "not a valid tokenizer"),
        (Tokenizer(models.WordLevel({"b": 0}, "?")).to_str(), "cannot encode 'a'"),
    ],
)
def test_missing_or_damaged_tokenizer(tmp_path: Path, content: str | None, expected: str) -> None:
    path = write_folder(tmp_path) / "tokenizer.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    with (
        open_checkpoint(tmp_path) as checkpoint,
        pytest.raises(CheckpointError, match=expected),
    ):
        _ = checkpoint.tokenizer


def _save(folder: Path, weights: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
    (folder / "config.json").write_text(json.dumps(hf_config()))
    save_file(dict(weights), folder / "model.safetensors")
    return weights
