"""Tiny random encoders of the BERT family as Hugging Face folders."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

Float = NDArray[np.float32]

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,!?'-"


def bert_config(model_type: str = "bert", **changes: Any) -> dict[str, Any]:
    """config.json of a tiny model."""
    sizes = {"hidden": 64, "inner": 128, "layers": 2, "heads": 4}
    if model_type == "distilbert":
        shape = {
            "dim": sizes["hidden"],
            "hidden_dim": sizes["inner"],
            "n_layers": sizes["layers"],
            "n_heads": sizes["heads"],
            "activation": "gelu",
        }
    else:
        shape = {
            "hidden_size": sizes["hidden"],
            "intermediate_size": sizes["inner"],
            "num_hidden_layers": sizes["layers"],
            "num_attention_heads": sizes["heads"],
            "hidden_act": "gelu",
            "type_vocab_size": 2 if model_type == "bert" else 1,
            "layer_norm_eps": 1e-12,
        }
    return {
        "model_type": model_type,
        "vocab_size": 128,
        "max_position_embeddings": 64,
        "pad_token_id": 0 if model_type != "roberta" else 1,
        **shape,
        **changes,
    }


def write_tiny_bert(
    folder: Path,
    model_type: str = "bert",
    *,
    pooling: str | None = "mean",
    normalize: bool = True,
    max_seq_length: int | None = None,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Write config.json, model.safetensors, tokenizer.json and, unless `pooling` is None, the files
    of sentence-transformers; returns `folder`. `changes` are keys of config.json."""
    config = bert_config(model_type, **changes)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    rng = np.random.default_rng(seed)
    tensors = {name: _random(name, shape, rng) for name, shape in _shapes(config)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    tiny_wordpiece().save(str(folder / "tokenizer.json"))
    if pooling is not None:
        write_sentence_files(folder, pooling, normalize, max_seq_length)
    return folder


def write_sentence_files(
    folder: Path, pooling: str, normalize: bool = True, max_seq_length: int | None = None
) -> None:
    """modules.json and what it points to."""
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling")]
    kinds += [("Normalize", "2_Normalize")] if normalize else []
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(kinds)
    ]
    _write_json(folder / "modules.json", modules)
    (folder / "1_Pooling").mkdir(exist_ok=True)
    flags = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens"}
    stated = {f"pooling_mode_{flag}": mode == pooling for mode, flag in flags.items()}
    stated |= {} if pooling in flags else {f"pooling_mode_{pooling}": True}
    _write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 64, **stated})
    length = {"max_seq_length": max_seq_length, "do_lower_case": False}
    _write_json(folder / "sentence_bert_config.json", length)


def tiny_wordpiece() -> Tokenizer:
    """WordPiece of letters, which pads and truncates unless told not to."""
    tokens = [*SPECIAL_TOKENS, *_LETTERS, *(f"##{letter}" for letter in _LETTERS)]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    cls, sep = (("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"]))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[cls, sep]
    )
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.enable_padding(length=32)
    tokenizer.enable_truncation(16)
    return tokenizer


def _shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    distil = config["model_type"] == "distilbert"
    hidden = config["dim" if distil else "hidden_size"]
    inner = config["hidden_dim" if distil else "intermediate_size"]
    layers = config["n_layers" if distil else "num_hidden_layers"]
    yield "embeddings.word_embeddings.weight", (config["vocab_size"], hidden)
    yield "embeddings.position_embeddings.weight", (config["max_position_embeddings"], hidden)
    if not distil:
        yield "embeddings.token_type_embeddings.weight", (config["type_vocab_size"], hidden)
    yield from _both("embeddings.LayerNorm", (hidden,))
    for i in range(layers):
        names = layer_names(config["model_type"], i)
        for name in names[:4]:
            yield from _both(name, (hidden, hidden))
        yield from _both(names[4], (hidden,))
        yield from _both(names[5], (inner, hidden))
        yield from _both(names[6], (hidden, inner))
        yield from _both(names[7], (hidden,))


def layer_names(model_type: str, layer: int) -> list[str]:
    """Query, key, value, output, first norm, first and second of the MLP, second norm."""
    if model_type == "distilbert":
        parts = ["attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin"]
        parts += ["sa_layer_norm", "ffn.lin1", "ffn.lin2", "output_layer_norm"]
        return [f"transformer.layer.{layer}.{part}" for part in parts]
    parts = [f"attention.self.{name}" for name in ("query", "key", "value")]
    parts += ["attention.output.dense", "attention.output.LayerNorm"]
    parts += ["intermediate.dense", "output.dense", "output.LayerNorm"]
    return [f"encoder.layer.{layer}.{part}" for part in parts]


def _both(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]


def _random(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Float:
    values = rng.standard_normal(shape)
    if name.endswith((".self.query.weight", ".self.key.weight", "q_lin.weight", "k_lin.weight")):
        values *= 2  # unit queries and keys would attend almost evenly
    if len(shape) == 2:
        values /= math.sqrt(shape[1])
    elif name.endswith("orm.weight"):
        values = 1 + 0.1 * values
    else:
        values *= 0.3
    return values.astype(np.float32)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
