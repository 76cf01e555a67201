"""Encoder checkpoints that cannot be used, and what their files say about pooling and length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_bert import write_sentence_files, write_tiny_bert

from headrace.exporters import cli
from headrace.exporters.checkpoint.sentence_transformers import sentence_settings
from headrace.exporters.encoder_package import export_encoder, measuring_texts
from headrace.exporters.package import export_package
from headrace.exporters.precision import Rule
from headrace.runtime.errors import CheckpointError, ConfigError, ExportError

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny_bert(tmp_path / "source")


def change(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**content, **values}), "utf-8")


def refused(source: Path, reason: str, **options: Any) -> None:
    """The export fails, and nothing is left behind."""
    output = source.parent / "package"
    with pytest.raises((CheckpointError, ConfigError, ExportError), match=reason):
        export_encoder(source, output, **options)
    assert [path.name for path in source.parent.iterdir()] == [source.name]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"num_hidden_layers": 3}, "has no tensor 'encoder.layer.2"),
        ({"num_hidden_layers": 1}, "counts 1 layers"),
        ({"hidden_size": 128}, "has shape"),
        ({"num_attention_heads": 5}, "cannot be shared by 5"),
        ({"hidden_act": "silu"}, "hidden_act='silu' is not supported"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "both directions"),
        ({"vocab_size": 40}, "has shape"),
        ({"max_position_embeddings": 2}, "room for 2 tokens"),
        ({"sparse_attention": "yes"}, "sparse_attention='yes' is not known"),
    ],
)
def test_configurations_that_do_not_fit(source: Path, values: dict[str, Any], reason: str) -> None:
    change(source / "config.json", **values)
    refused(source, reason, precision="fp32")


def test_values_that_are_not_finite(source: Path) -> None:
    file = source / "model.safetensors"
    tensors = load_file(file)
    tensors["encoder.layer.0.output.dense.weight"][3, 5] = np.nan
    save_file(tensors, file)
    refused(source, "not finite", precision="fp32")


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_missing_files(source: Path, name: str) -> None:
    (source / name).unlink()
    refused(source, name)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"precision": "auto"}, "for an encoder"),
        ({"kv_cache": "int8"}, "this source is an encoder"),
        ({"stages": 2}, "this source is an encoder"),
        ({"tensor_parallel": 2}, "this source is an encoder"),
        ({"targets": ("cuda_fp16",)}, "this source is an encoder"),
        ({"rules": [Rule("*.nothing", "fp32")]}, "such as encoder.layer."),
        ({"quant_threshold": 0.1}, "this source is an encoder"),
        ({"precision": "int3"}, "precision='int3'"),
    ],
)
def test_options_of_decoders(source: Path, options: dict[str, Any], reason: str) -> None:
    refused(source, reason, **options)


def test_a_package_far_from_fp32_is_not_written(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.exporters.encoder_package.COSINE_GATE", 0.9999999)
    refused(source, "mean cosine of 0.99")
    result = export_encoder(source, source.parent / "package", force=True)
    assert result.fidelity is not None and result.fidelity.mean_cosine > 0.99


def test_the_command_knows_an_encoder(source: Path, capsys: Capture) -> None:
    output = source.parent / "package"
    assert cli.main([str(source), "-o", str(output)]) == 0
    shown = capsys.readouterr().out
    assert "bert encoder, w8a8_row" in shown and "pooling mean, normalized" in shown
    assert "cosine to the FP32 model 0.99" in shown
    assert cli.main([str(source), "-o", str(output), "--kv-cache", "int4", "--overwrite"]) == 2


def test_presets_are_about_decoders(source: Path, capsys: Capture) -> None:
    """A server may be given one preset for checkpoints of both kinds."""
    output = source.parent / "package"
    assert cli.main([str(source), "-o", str(output), "--preset", "low-memory"]) == 0
    assert "bert encoder, w8a8_row" in capsys.readouterr().out


def test_the_exporter_of_decoders_points_to_the_other(source: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'bert' is an encoder.*export_encoder"):
        export_package(source, source.parent / "package")


def test_without_files_of_sentence_transformers_the_mean(tmp_path: Path) -> None:
    source = write_tiny_bert(tmp_path / "source", pooling=None)
    pooling = export_encoder(source, tmp_path / "package").manifest.pooling
    assert (pooling.mode, pooling.normalize, pooling.stated) == ("mean", False, False)


def test_the_longest_text_is_the_smallest_of_what_is_said(source: Path) -> None:
    def limit() -> int:
        output = source.parent / "package"
        manifest = export_encoder(source, output, precision="fp32", overwrite=True).manifest
        return manifest.model.max_tokens

    assert limit() == 64
    settings = source / "tokenizer_config.json"
    settings.write_text('{"model_max_length": 48}', "utf-8")
    assert limit() == 48
    change(source / "sentence_bert_config.json", max_seq_length=32)
    assert limit() == 32
    change(source / "sentence_bert_config.json", max_seq_length=1000)
    assert limit() == 64


@pytest.mark.parametrize(
    ("pooling", "found"),
    [
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": ["max"]}, "max"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"word_embedding_dimension": 64}, "mean"),
    ],
)
def test_spellings_of_pooling(tmp_path: Path, pooling: dict[str, Any], found: str) -> None:
    write_sentence_files(tmp_path, "mean")
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling), "utf-8")
    assert sentence_settings(tmp_path).pooling == found


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "lasttoken"}, "pooling lasttoken"),
        ("1_Pooling/config.json", {"pooling_mode": ["cls", "max"]}, r"cls \+ max"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
        ("sentence_bert_config.json", {"max_seq_length": "long"}, "max_seq_length='long'"),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "'query'"),
        ("modules.json", {"a": 1}, "not a list of modules"),
        ("modules.json", [{"type": "a.Transformer", "path": "../.."}], "not a list of modules"),
        ("modules.json", [{"type": "a.Transformer", "path": ""}], "has no Pooling"),
        ("modules.json", [{"type": "a.Dense", "path": "2_Dense"}], "module 'Dense'"),
    ],
)
def test_files_that_ask_for_more(tmp_path: Path, file: str, content: object, reason: str) -> None:
    write_sentence_files(tmp_path, "mean")
    (tmp_path / file).write_text(json.dumps(content), "utf-8")
    with pytest.raises(CheckpointError, match=reason):
        sentence_settings(tmp_path)


def test_texts_to_measure_on_have_many_lengths(source: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    lengths = {len(ids) for ids in measuring_texts(tokenizer, 64)}
    assert len(lengths) > 8 and max(lengths) == 64
