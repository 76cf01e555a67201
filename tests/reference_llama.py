"""The Llama decoder as written in its papers, in numpy and float64: the slow twin of the graph.

Reads tensors under their Hugging Face names. Shares no code with the exporter: it may only be
right or wrong on its own. Formulas: RMSNorm (Zhang and Sennrich, 2019), rotary positions (Su et
al., 2021; the half-split layout of transformers), grouped-query attention (Ainslie et al., 2023),
SwiGLU (Shazeer, 2020), long-context scaling of Llama 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.floating[Any]]


def forward(
    tensors: Mapping[str, Float], config: Mapping[str, Any], token_ids: Sequence[int]
) -> Float:
    """Logits [T, vocab] of every position, float64 where the tensors are.

    Args:
        tensors: `*.weight` [out, in] and `*.bias` [out] by name.
        config: keys of config.json.
        token_ids: one sequence of T tokens, from position 0.
    """
    eps = float(config["rms_norm_eps"])
    embedding = tensors["model.embed_tokens.weight"]
    x = embedding[np.asarray(token_ids)]
    cos, sin = rope_tables(config, len(token_ids))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        normed = rms_norm(x, tensors[f"{prefix}input_layernorm.weight"], eps)
        x = x + _attention(tensors, config, f"{prefix}self_attn.", normed, cos, sin)
        normed = rms_norm(x, tensors[f"{prefix}post_attention_layernorm.weight"], eps)
        x = x + _mlp(tensors, f"{prefix}mlp.", normed)
    head = embedding if config["tie_word_embeddings"] else tensors["lm_head.weight"]
    logits: Float = rms_norm(x, tensors["model.norm.weight"], eps) @ head.T
    return logits


def greedy(
    tensors: Mapping[str, Float], config: Mapping[str, Any], prompt: Sequence[int], steps: int
) -> list[int]:
    """The most probable next tokens, one at a time, recomputing everything at each."""
    tokens = list(prompt)
    for _ in range(steps):
        tokens.append(int(forward(tensors, config, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def entropy_nats(logits: Float) -> Float:
    """Of softmax over the last axis: [..., V] to [...]."""
    shifted = logits - logits.max(-1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    entropy: Float = -(np.exp(log_probs) * log_probs).sum(-1)
    return entropy


def rms_norm(x: Float, gain: Float, eps: float) -> Float:
    normed: Float = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gain
    return normed


def rope_tables(config: Mapping[str, Any], positions: int) -> tuple[Float, Float]:
    """cos and sin [positions, head_dim / 2]."""
    angles = np.outer(np.arange(positions), inverse_frequencies(config))
    return np.cos(angles), np.sin(angles)


def inverse_frequencies(config: Mapping[str, Any]) -> Float:
    """Radians a position, [head_dim / 2]. Takes both spellings of the rotary settings."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    half = _head_dim(config) // 2
    frequencies = np.array([theta ** (-i / half) for i in range(half)])
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "linear":
        return frequencies / float(rope["factor"])
    if kind == "llama3":
        return np.array([_llama3_frequency(f, rope) for f in frequencies])
    assert kind == "default", kind
    return frequencies


def _llama3_frequency(frequency: float, rope: Mapping[str, Any]) -> float:
    """Short wavelengths stay, long ones are divided by `factor`, between them it is mixed."""
    wavelength = 2 * math.pi / frequency
    trained = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    if wavelength < trained / high:
        return frequency
    if wavelength > trained / low:
        return float(frequency / rope["factor"])
    share = (trained / wavelength - low) / (high - low)
    return float((1 - share) * frequency / rope["factor"] + share * frequency)


def _attention(
    tensors: Mapping[str, Float],
    config: Mapping[str, Any],
    prefix: str,
    x: Float,
    cos: Float,
    sin: Float,
) -> Float:
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    kv_heads = kv_heads or heads
    length, dim = len(x), _head_dim(config)
    query = _linear(tensors, f"{prefix}q_proj", x).reshape(length, heads, dim)
    key = _linear(tensors, f"{prefix}k_proj", x).reshape(length, kv_heads, dim)
    value = _linear(tensors, f"{prefix}v_proj", x).reshape(length, kv_heads, dim)
    query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
    mixed = np.empty_like(query)
    hidden = np.triu(np.full((length, length), -np.inf), 1)  # a token does not see later ones
    for head in range(heads):
        shared = head * kv_heads // heads
        scores = query[:, head] @ key[:, shared].T / math.sqrt(dim) + hidden
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed[:, head] = weights / weights.sum(-1, keepdims=True) @ value[:, shared]
    return _linear(tensors, f"{prefix}o_proj", mixed.reshape(length, heads * dim))


def _rotate(x: Float, cos: Float, sin: Float) -> Float:
    """Turn pairs (i, i + dim / 2) of [T, heads, dim] by the angle of their position."""
    first, second = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _mlp(tensors: Mapping[str, Float], prefix: str, x: Float) -> Float:
    gate = _linear(tensors, f"{prefix}gate_proj", x)
    up = _linear(tensors, f"{prefix}up_proj", x)
    return _linear(tensors, f"{prefix}down_proj", gate / (1 + np.exp(-gate)) * up)


def _linear(tensors: Mapping[str, Float], name: str, x: Float) -> Float:
    y: Float = x @ tensors[f"{name}.weight"].T
    bias = tensors.get(f"{name}.bias")
    return y if bias is None else y + bias


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
