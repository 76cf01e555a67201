"""Small synthetic checkpoints, and where the real one is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

LAYERS, HIDDEN, HEADS, KV_HEADS, FFN, CONTEXT = 2, 64, 4, 2, 128, 512
HEAD_DIM = HIDDEN // HEADS

# Byte-level vocabulary: two control tokens, a user-defined one, the alphabet, one merge.
CONTROL, USER = ("<s>", "<|im_end|>"), "<tool>"
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*CONTROL, USER, *ALPHABET, "he"]
TYPES = [3, 3, 4] + [1] * (len(TOKENS) - 3)
MERGES = ["h e"]
VOCAB = len(TOKENS)

Array = NDArray[np.float32]


def hf_tensors(*, tied: bool = True, bias: bool = False) -> dict[str, Array]:
    """Weights of the small llama under Hugging Face names, in Hugging Face layout."""
    rng = np.random.default_rng(0)
    kv = KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": (HIDDEN,),
            layer + "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            layer + "self_attn.k_proj.weight": (kv, HIDDEN),
            layer + "self_attn.v_proj.weight": (kv, HIDDEN),
            layer + "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            layer + "post_attention_layernorm.weight": (HIDDEN,),
            layer + "mlp.gate_proj.weight": (FFN, HIDDEN),
            layer + "mlp.up_proj.weight": (FFN, HIDDEN),
            layer + "mlp.down_proj.weight": (HIDDEN, FFN),
        }
        if bias:
            shapes |= {
                layer + "self_attn.q_proj.bias": (HIDDEN,),
                layer + "self_attn.k_proj.bias": (kv,),
                layer + "self_attn.v_proj.bias": (kv,),
                layer + "self_attn.o_proj.bias": (HIDDEN,),
            }
    return {n: rng.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, layer, inner = module.split(".", 3)
        return f"blk.{layer}.{_GGUF_NAMES[inner]}.{kind}"
    return f"{_GGUF_NAMES[module]}.{kind}"


def interleave(name: str, weight: Array) -> Array:
    """What llama.cpp's converter does to query and key rows (slow twin of the reader)."""
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
    if heads is None:
        return weight
    out, size = np.empty_like(weight), weight.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = weight[head * size + i]
            out[head * size + 2 * i + 1] = weight[head * size + i + size // 2]
    return out


def default_metadata() -> dict[str, Any]:
    return {
        "llama.context_length": CONTEXT,
        "llama.embedding_length": HIDDEN,
        "llama.block_count": LAYERS,
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 50000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ messages }}",
    }


def write_gguf(
    path: Path,
    *,
    tensors: Mapping[str, Array] | None = None,
    raw: Sequence[tuple[str, NDArray[Any], Type]] = (),
    matrix_type: Type = Type.F32,
    architecture: str = "llama",
    **changes: Any,
) -> Path:
    """Write a small llama; `changes` are metadata keys with "__" for "." (None drops a key)."""
    metadata = default_metadata()
    for key, value in changes.items():
        metadata[key.replace("__", ".")] = value
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, weight in (hf_tensors() if tensors is None else tensors).items():
        kind = matrix_type if weight.ndim == 2 else Type.F32
        writer.add_tensor(gguf_name(name), quantize(interleave(name, weight), kind), raw_dtype=kind)
    for name, data, kind in raw:
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def hf_config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    }


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(TOKENS)}, merges=[("h", "e")])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(list(CONTROL))
    return tokenizer


def write_folder(
    folder: Path,
    *,
    tensors: Mapping[str, Array] | None = None,
    shards: int = 1,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """A Hugging Face folder of the same model, in one safetensors file or several."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(hf_tensors() if tensors is None else tensors)
    (folder / "config.json").write_text(json.dumps(hf_config() if config is None else config))
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in list(weights)[i::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
