"""A small model of every architecture: config.json keys, and random weights made without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tiny
from safetensors.numpy import save_file

from headrace.exporters.archs.registry import decoder_spec
from headrace.exporters.archs.tensors import expected_tensors
from headrace.exporters.checkpoint.hf_config import normalize_config

_SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
# Windows are shorter than the texts of tests, which have up to 40 tokens.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2"},
    "qwen2_tied_window": {
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    "qwen2_yarn": {
        "model_type": "qwen2",
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 16,
        },
    },
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral_window": {"model_type": "mistral", "sliding_window": 6, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "qwen3_bias_untied": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
    "gemma": {"model_type": "gemma", "head_dim": 32, "tie_word_embeddings": True},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 32,
        "sliding_window": 6,
        "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 200,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "tie_word_embeddings": True,
    },
    "gemma3_old_keys": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "head_dim": 16,
        "sliding_window": 6,
        "query_pre_attn_scalar": 16,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_local_base_freq": 10000.0,
        "tie_word_embeddings": True,
    },
    "olmo2": {"model_type": "olmo2", "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
    "olmo2_untied": {"model_type": "olmo2", "attention_bias": True},
    "olmo3": {
        "model_type": "olmo3",
        "num_hidden_layers": 4,
        "sliding_window": 6,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "attention_factor": 1.3,
            "original_max_position_embeddings": 16,
        },
    },
    "olmo3_listed_layers": {
        "model_type": "olmo3",
        "sliding_window": 7,
        "rms_norm_eps": 1e-6,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 20000.0,
                "factor": 8.0,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "original_max_position_embeddings": 16,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
        },
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.1,
        "tie_word_embeddings": True,
    },
    "granite_untied": {
        "model_type": "granite",
        "attention_multiplier": 0.2,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "phi3": {"model_type": "phi3", "sliding_window": 7, "pad_token_id": 0},
    "phi3_partial_longrope": {
        "model_type": "phi3",
        "pad_token_id": 0,
        "head_dim": 32,
        "hidden_size": 128,
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 64,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.5, 1.7, 2.0],
            "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 9.0, 12.0, 16.0],
        },
        "tie_word_embeddings": True,
    },
    "stablelm": {
        "model_type": "stablelm",
        "hidden_size": 256,
        "use_qkv_bias": True,
        "tie_word_embeddings": True,
    },
    "stablelm_half": {"model_type": "stablelm", "hidden_size": 128, "partial_rotary_factor": 0.5},
    "stablelm_10_pairs": {
        "model_type": "stablelm",
        "hidden_size": 320,
        "partial_rotary_factor": 0.25,
        "use_qkv_bias": True,
    },
    "smollm3": {
        "model_type": "smollm3",
        "pad_token_id": 0,
        "num_hidden_layers": 4,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
    "smollm3_listed_window": {
        "model_type": "smollm3",
        "pad_token_id": 0,
        "num_hidden_layers": 3,
        "no_rope_layers": [0, 1, 0],
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "attention_bias": True,
        "mlp_bias": True,
    },
    "starcoder2": {"model_type": "starcoder2", "sliding_window": 7, "tie_word_embeddings": True},
    "starcoder2_untied": {
        "model_type": "starcoder2",
        "use_bias": False,
        "tie_word_embeddings": False,
    },
    "arcee": {"model_type": "arcee"},
    "arcee_bias_yarn": {
        "model_type": "arcee",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 16,
        },
        "tie_word_embeddings": True,
    },
    "seed_oss": {"model_type": "seed_oss", "head_dim": 32},
    "seed_oss_bias": {
        "model_type": "seed_oss",
        "head_dim": 16,
        "attention_bias": False,
        "attention_out_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "gpt2": {"model_type": "gpt2", "n_inner": 192, "tie_word_embeddings": True},
    "gpt2_untied": {"model_type": "gpt2", "tie_word_embeddings": False},
}
_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
# Longer ones would be computed with other tables than transformers takes for short texts.
CONTEXTS = {"phi3_partial_longrope": 64}


def config_of(name: str) -> dict[str, Any]:
    """Keys of config.json."""
    config = {**_SHAPE, **CONFIGS[name]}
    if config["model_type"] != "gpt2":
        return config
    kept = {
        k: v for k, v in config.items() if k not in ("intermediate_size", "num_key_value_heads")
    }
    return {_GPT2_NAMES.get(key, key): value for key, value in kept.items()}


def write_model(name: str, folder: Path) -> Path:
    """Write config.json, weights and a tokenizer; returns `folder`."""
    folder.mkdir(parents=True)
    config = config_of(name)
    config.setdefault("tie_word_embeddings", False)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rng = np.random.default_rng(0)
    tensors = {}
    spec = decoder_spec(normalize_config(config, (), folder))
    mean = 1 - spec.gain_offset
    for tensor, shape in expected_tensors(spec):
        values = rng.standard_normal(shape).astype(np.float32)
        is_matrix = len(shape) == 2
        average = 0.0 if tensor.endswith("bias") else mean
        tensors[tensor] = values * (2 / shape[-1] ** 0.5) if is_matrix else average + 0.2 * values
    save_file(tensors, folder / "model.safetensors")
    tiny.tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return folder
