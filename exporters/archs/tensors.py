"""Does the checkpoint hold the tensors that its configuration promises?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from headrace.exporters.archs.spec import DecoderSpec
from headrace.runtime.errors import CheckpointError


class Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


def check_tensors(spec: DecoderSpec, tensors: Mapping[str, Shaped]) -> None:
    """Check names and shapes before anything is read.

    Raises:
        CheckpointError: a tensor is missing or has another shape, or there are layers beyond
            those that the configuration counts, which would be dropped silently.
    """
    for name, shape in _expected(spec):
        found = tensors[name].shape
        if found != shape:
            raise CheckpointError(
                f"tensor {name!r} has shape {list(found)}, the configuration asks for "
                f"{list(shape)}; download or convert the checkpoint again"
            )
    beyond = f"{spec.layer.attention_norm.format(spec.num_layers)}.weight"
    if beyond in tensors:
        raise CheckpointError(
            f"the configuration counts {spec.num_layers} layers, but there is a tensor {beyond!r}; "
            "download or convert the checkpoint again"
        )


def _expected(spec: DecoderSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor's name and shape. Lazy: a hostile count of layers ends at the first missing."""
    hidden, inner, names = spec.hidden_size, spec.intermediate_size, spec.layer
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = {
        names.query: (queries, hidden),
        names.key: (keys, hidden),
        names.value: (keys, hidden),
        names.output: (hidden, queries),
    }
    mlp = {names.gate: (inner, hidden), names.up: (inner, hidden), names.down: (hidden, inner)}
    yield f"{spec.embed}.weight", (spec.vocab_size, hidden)
    for layer in range(spec.num_layers):
        for norm in (names.attention_norm, names.mlp_norm):
            yield f"{norm.format(layer)}.weight", (hidden,)
        for linears, has_bias in ((attention, spec.attention_bias), (mlp, spec.mlp_bias)):
            for name, shape in linears.items():
                yield f"{name.format(layer)}.weight", shape
                if has_bias:
                    yield f"{name.format(layer)}.bias", shape[:1]
    yield f"{spec.final_norm}.weight", (hidden,)
    if not spec.tied_embeddings:
        yield f"{spec.head}.weight", (spec.vocab_size, hidden)
