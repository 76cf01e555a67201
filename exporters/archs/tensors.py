"""Does the checkpoint hold the tensors that its configuration promises, and no others?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from headrace.exporters.archs.spec import DecoderSpec
from headrace.runtime.errors import CheckpointError

# Tables that follow from the configuration, saved by old versions of transformers.
_DERIVED_ENDINGS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


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
    """Name and shape of every tensor of the checkpoint. Lazy, so that a model larger than its
    weights ends at the first that is missing."""
    hidden = spec.hidden_size
    yield f"{spec.embed}.weight", (spec.vocab_size, hidden)
    if spec.positions is not None:
        yield f"{spec.positions}.weight", (spec.context_tokens, hidden)
    for layer in range(spec.num_layers):
        for norm in spec.layer.norms():
            yield from _norm(norm.format(layer), hidden, spec.norm == "layer")
        for head_norm, heads in (
            (spec.layer.query_norm, spec.num_heads),
            (spec.layer.key_norm, spec.num_kv_heads),
        ):
            if head_norm is not None:
                width = spec.head_dim * (heads if spec.wide_head_norms else 1)
                yield from _norm(head_norm.format(layer), width, False)
        for name, (out, inputs), has_bias, transposed in _stored_linears(spec):
            shape = (inputs, out) if transposed else (out, inputs)
            yield f"{name.format(layer)}.weight", shape
            if has_bias:
                yield f"{name.format(layer)}.bias", (out,)
    yield from _norm(spec.final_norm, hidden, spec.norm == "layer")
    if not spec.tied_embeddings:
        yield f"{spec.head}.weight", (spec.vocab_size, hidden)


def weight_names(spec: DecoderSpec) -> list[str]:
    """Of every matrix whose format can be chosen, as `precision_report.json` has them."""
    layers = [name.format(i) for i in range(spec.num_layers) for name in linear_shapes(spec)]
    return [spec.embed, spec.head, *layers]


def linear_shapes(spec: DecoderSpec) -> dict[str, tuple[tuple[int, int], bool]]:
    """Of each linear layer its [out, in], and whether it has a bias."""
    hidden, inner, names = spec.hidden_size, spec.intermediate_size, spec.layer
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    gate = {} if names.gate is None else {names.gate: ((inner, hidden), spec.mlp_bias)}
    return {
        names.query: ((queries, hidden), spec.qkv_bias),
        names.key: ((keys, hidden), spec.qkv_bias),
        names.value: ((keys, hidden), spec.qkv_bias),
        names.output: ((hidden, queries), spec.output_bias),
        **gate,
        names.up: ((inner, hidden), spec.mlp_bias),
        names.down: ((hidden, inner), spec.mlp_bias),
    }


def _stored_linears(spec: DecoderSpec) -> Iterator[tuple[str, tuple[int, int], bool, bool]]:
    """Name, [out, in], bias and whether it is transposed."""
    linears = linear_shapes(spec)
    for stored in spec.stored:
        parts = [linears.pop(part) for part in stored.parts]
        rows = sum(shape[0] for shape, _ in parts)
        (_, inputs), has_bias = parts[0]
        yield stored.name, (rows, inputs), has_bias, stored.transposed
    for name, (shape, has_bias) in linears.items():
        yield name, shape, has_bias, False


def _norm(name: str, width: int, has_bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (width,)
    if has_bias:
        yield f"{name}.bias", (width,)
