"""A BERT encoder in float64, one text at a time, written from the papers' formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tiny import read_folder
from tiny_bert import layer_names

Float64 = NDArray[np.float64]
_erf = np.vectorize(math.erf)
_ACTIVATIONS: dict[str, Callable[[Float64], Float64]] = {
    "gelu": lambda x: x * 0.5 * (1 + _erf(x / math.sqrt(2))),
    "gelu_new": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
}


class ReferenceBert:
    """Hidden states of a Hugging Face folder's model."""

    def __init__(self, folder: Path) -> None:
        self.tensors, self.config = read_folder(folder)
        self.kind = self.config["model_type"]
        distil = self.kind == "distilbert"
        self.layers = self.config["n_layers" if distil else "num_hidden_layers"]
        self.heads = self.config["n_heads" if distil else "num_attention_heads"]
        self.activation = _ACTIVATIONS[self.config["activation" if distil else "hidden_act"]]
        offset = self.kind in ("roberta", "xlm-roberta", "camembert")
        self.first = self.config["pad_token_id"] + 1 if offset else 0

    def states(self, ids: Sequence[int]) -> Float64:
        """float64 [len(ids), hidden]."""
        t = self.tensors
        places = np.arange(len(ids)) + self.first
        x = t["embeddings.word_embeddings.weight"][list(ids)]
        x = x + t["embeddings.position_embeddings.weight"][places]
        if self.kind != "distilbert":
            x = x + t["embeddings.token_type_embeddings.weight"][0]
        x = self._norm(x, "embeddings.LayerNorm")
        for i in range(self.layers):
            q, k, v, out, first, inner, outer, second = layer_names(self.kind, i)
            x = self._norm(x + self._linear(self._attend(x, q, k, v), out), first)
            x = self._norm(x + self._linear(self.activation(self._linear(x, inner)), outer), second)
        return x

    def vector(self, ids: Sequence[int], pooling: str, normalize: bool) -> Float64:
        """float64 [hidden]."""
        states = self.states(ids)
        pooled = {"mean": states.mean(axis=0), "cls": states[0], "max": states.max(axis=0)}[pooling]
        return np.asarray(pooled / np.linalg.norm(pooled) if normalize else pooled)

    def _attend(self, x: Float64, *names: str) -> Float64:
        q, k, v = (
            self._linear(x, name).reshape(len(x), self.heads, -1).swapaxes(0, 1) for name in names
        )
        scores = q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.asarray((weights @ v).swapaxes(0, 1).reshape(len(x), -1))

    def _linear(self, x: Float64, name: str) -> Float64:
        return np.asarray(x @ self.tensors[f"{name}.weight"].T + self.tensors[f"{name}.bias"])

    def _norm(self, x: Float64, name: str) -> Float64:
        centred = x - x.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-12)
        return np.asarray(scaled * self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"])
