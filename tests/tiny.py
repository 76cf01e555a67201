"""A small random Llama checkpoint in Hugging Face form, made without torch.

    folder = write_tiny_llama(tmp_path / "tiny", heads=4, kv_heads=2)
    tensors, config = read_folder(folder)     # float64, for tests/reference_llama.py

Weights are scaled so that the model is not trivial: logits have a spread of a few nats, attention
is neither uniform nor one-hot, and greedy text does not just repeat its last token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

Float64 = NDArray[np.float64]

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID = 0, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Bytes that no UTF-8 text holds: leaving them out makes room for control tokens among 256 ids.
_NEVER_IN_UTF8 = frozenset([0xC0, 0xC1, *range(0xF5, 0x100)])
_MERGES = [("Ġ", "t"), ("h", "e"), ("i", "n"), ("e", "r"), ("Ġ", "a"), ("o", "n"), ("r", "e")]
_SCALES = {
    "self_attn.q_proj": 2.0,  # unit queries and keys would attend almost evenly
    "self_attn.k_proj": 2.0,
    "self_attn.o_proj": 3.0,  # what layers add outweighs the embedding, so that it is not copied
    "mlp.down_proj": 3.0,
}
_NUMPY_TYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
_SAFETENSORS_TYPES: dict[str, Any] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}


def write_tiny_llama(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 256,
    tied: bool = True,
    shards: int = 1,
    dtype: str = "float32",
    rope_scaling: Mapping[str, object] | None = None,
    rope_theta: float = 10000.0,
    bias: bool = False,
    context: int = 512,
) -> Path:
    """Write config.json, safetensors, tokenizer and generation_config.json; returns `folder`.

    Args:
        vocab: rows of the embedding, at least 256. The tokenizer knows the first 253 ids
            whatever this is: control tokens, the bytes of UTF-8, a few merges.
        shards: weight files; more than one come with an index.
        dtype: of the weights, "float32", "float16" or "bfloat16".
        bias: attention and MLP layers have biases.
    """
    assert vocab >= 256 and hidden % heads == 0 and heads % kv_heads == 0
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": context,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": rope_theta,
        "rope_scaling": dict(rope_scaling) if rope_scaling else None,
        "tie_word_embeddings": tied,
        "attention_bias": bias,
        "mlp_bias": bias,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": dtype,
    }
    tensors = {
        name: values.astype(_NUMPY_TYPES[dtype])
        for name, values in _random_tensors(config, np.random.default_rng(seed)).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": EOS_ID, "do_sample": False})
    _write_weights(folder, tensors, shards)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": CONTROL_TOKENS[BOS_ID],
            "eos_token": CONTROL_TOKENS[EOS_ID],
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return folder


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE of 253 tokens; every UTF-8 text can be encoded and decodes to itself."""
    alphabet = [c for b, c in _byte_characters().items() if b not in _NEVER_IN_UTF8]
    tokens = [*CONTROL_TOKENS, *alphabet, *("".join(pair) for pair in _MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=_MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(CONTROL_TOKENS))
    return tokenizer


def read_folder(folder: Path) -> tuple[dict[str, Float64], dict[str, Any]]:
    """All tensors of a Hugging Face folder as float64, by name, and its config.json.

    Reads the files itself, so that it can vouch for a reader under test.
    """
    tensors: dict[str, Float64] = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, info in json.loads(data[8:start]).items():
            if name == "__metadata__":
                continue
            begin, end = (start + offset for offset in info["data_offsets"])
            values = np.frombuffer(data[begin:end], _SAFETENSORS_TYPES[info["dtype"]])
            tensors[name] = values.astype(np.float64).reshape(info["shape"])
    return tensors, json.loads((folder / "config.json").read_text(encoding="utf-8"))


def _random_tensors(config: dict[str, Any], rng: np.random.Generator) -> dict[str, Float64]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv_width = config["num_key_value_heads"] * config["head_dim"]
    linears = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv_width, hidden),
        "self_attn.v_proj": (kv_width, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }

    def matrix(rows: int, columns: int) -> Float64:
        values: Float64 = rng.standard_normal((rows, columns)) / math.sqrt(columns)
        return values

    def gain() -> Float64:
        values: Float64 = 1 + 0.1 * rng.standard_normal(hidden)
        return values

    tensors = {"model.embed_tokens.weight": 4 * matrix(config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors[f"{prefix}input_layernorm.weight"] = gain()
        for name, (rows, columns) in linears.items():
            tensors[f"{prefix}{name}.weight"] = _SCALES.get(name, 1.0) * matrix(rows, columns)
            if config["attention_bias"]:
                tensors[f"{prefix}{name}.bias"] = 0.5 * rng.standard_normal(rows)
        tensors[f"{prefix}post_attention_layernorm.weight"] = gain()
    # Signs, or a tied head would find in each vector the token that it came from.
    tensors["model.norm.weight"] = gain() * rng.choice([-1.0, 1.0], hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = 4 * matrix(config["vocab_size"], hidden)
    return tensors


def _write_weights(folder: Path, tensors: dict[str, NDArray[Any]], shards: int) -> None:
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata)
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = names[i::shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata)
        weight_map |= dict.fromkeys(part, file)
    total = sum(values.nbytes for values in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _byte_characters() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte: itself where printable, else from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = (b for b in range(256) if b not in printable)
    return {b: chr(b) for b in sorted(printable)} | {b: chr(256 + i) for i, b in enumerate(shifted)}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
