"""Does an encoder's checkpoint hold the tensors that its configuration promises?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from headrace.exporters.archs.encoder_spec import EncoderSpec
from headrace.exporters.archs.tensors import Shaped
from headrace.runtime.errors import CheckpointError


def check_encoder_tensors(spec: EncoderSpec, tensors: Mapping[str, Shaped]) -> None:
    """Check names and shapes before anything is read.

    Raises:
        CheckpointError: a tensor is missing or has another shape, or there are more layers than
            the configuration counts.
    """
    for name, shape in _expected(spec):
        found = tensors[name].shape
        if found != shape:
            raise CheckpointError(
                f"tensor {name!r} has shape {list(found)}, the configuration asks for "
                f"{list(shape)}; download or convert the checkpoint again"
            )
    beyond = f"{spec.layer.query.format(spec.num_layers)}.weight"
    if beyond in tensors:
        raise CheckpointError(
            f"the configuration counts {spec.num_layers} layers, but there is a tensor {beyond!r}; "
            "download or convert the checkpoint again"
        )


def encoder_weight_names(spec: EncoderSpec) -> list[str]:
    """Of every matrix whose format can be chosen, as `precision_report.json` has them."""
    layers = [name.format(i) for i in range(spec.num_layers) for name in _linears(spec)]
    return [spec.word, *layers]


def _linears(spec: EncoderSpec) -> dict[str, tuple[int, int]]:
    """Of each linear layer its [out, in]."""
    hidden, inner, names = spec.hidden_size, spec.intermediate_size, spec.layer
    return {
        names.query: (hidden, hidden),
        names.key: (hidden, hidden),
        names.value: (hidden, hidden),
        names.output: (hidden, hidden),
        names.inner: (inner, hidden),
        names.outer: (hidden, inner),
    }


def _expected(spec: EncoderSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor's name and shape. Lazy: a hostile count of layers ends at the first missing."""
    hidden, names = spec.hidden_size, spec.layer
    yield f"{spec.word}.weight", (spec.vocab_size, hidden)
    yield f"{spec.position}.weight", (spec.first_position + spec.max_tokens, hidden)
    if spec.token_type is not None:
        yield f"{spec.token_type}.weight", (spec.token_types, hidden)
    yield from _norm(spec.embedding_norm, hidden)
    for layer in range(spec.num_layers):
        for norm in (names.attention_norm, names.mlp_norm):
            yield from _norm(norm.format(layer), hidden)
        for name, shape in _linears(spec).items():
            yield f"{name.format(layer)}.weight", shape
            yield f"{name.format(layer)}.bias", shape[:1]


def _norm(name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)
