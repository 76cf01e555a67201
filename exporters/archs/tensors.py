"""Does the checkpoint hold the tensors that its configuration promises, and no others?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from headrace.exporters.archs.spec import DecoderSpec
from headrace.runtime.errors import CheckpointError

# Tables that follow from the configuration, saved by old versions of transformers.
_DERIVED_ENDINGS = (".rotary_emb.inv_freq",)


class Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


def check_tensors(spec: DecoderSpec, tensors: Mapping[str, Shaped]) -> None:
    """Check names and shapes before anything is read.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or has no place in the model that
            the configuration describes: leaving it out would compute something else.
    """
    unused = set(tensors)
    for name, shape in expected_tensors(spec):
        found = tensors[name].shape
        if found != shape:
            raise CheckpointError(
                f"tensor {name!r} has shape {list(found)}, the configuration asks for "
                f"{list(shape)}; download or convert the checkpoint again"
            )
        unused.discard(name)
    if spec.tied_embeddings:
        unused.discard("lm_head.weight")  # some checkpoints hold the embedding twice
    if extra := sorted(name for name in unused if not name.endswith(_DERIVED_ENDINGS)):
        raise CheckpointError(
            f"there is a tensor {extra[0]!r}, which a {spec.architecture} model of "
            f"{spec.num_layers} layers with this configuration does not have; correct config.json, "
            "or download or convert the checkpoint again"
        )


def expected_tensors(spec: DecoderSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor's name and shape. Lazy: a hostile count of layers ends at the first missing."""
    hidden, inner, names = spec.hidden_size, spec.intermediate_size, spec.layer
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    linears = (
        (names.query, (queries, hidden), spec.qkv_bias),
        (names.key, (keys, hidden), spec.qkv_bias),
        (names.value, (keys, hidden), spec.qkv_bias),
        (names.output, (hidden, queries), spec.output_bias),
        (names.gate, (inner, hidden), spec.mlp_bias),
        (names.up, (inner, hidden), spec.mlp_bias),
        (names.down, (hidden, inner), spec.mlp_bias),
    )
    yield f"{spec.embed}.weight", (spec.vocab_size, hidden)
    for layer in range(spec.num_layers):
        for norm in names.norms():
            yield f"{norm.format(layer)}.weight", (hidden,)
        for head_norm in (names.query_norm, names.key_norm):
            if head_norm is not None:
                yield f"{head_norm.format(layer)}.weight", (spec.head_dim,)
        for name, shape, has_bias in linears:
            yield f"{name.format(layer)}.weight", shape
            if has_bias:
                yield f"{name.format(layer)}.bias", shape[:1]
    yield f"{spec.final_norm}.weight", (hidden,)
    if not spec.tied_embeddings:
        yield f"{spec.head}.weight", (spec.vocab_size, hidden)
