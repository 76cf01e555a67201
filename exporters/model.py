"""From an open checkpoint to what graphs are built from."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.exporters.archs.registry import decoder_spec
from headrace.exporters.archs.spec import DecoderSpec
from headrace.exporters.archs.tensors import check_tensors
from headrace.exporters.archs.views import tensor_views
from headrace.exporters.checkpoint.source import Checkpoint, LazyTensor
from headrace.exporters.graph.decoder import DecoderParts
from headrace.exporters.graph.linear import Float32
from headrace.exporters.graph.rope import rope_tables
from headrace.exporters.precision import Precision
from headrace.exporters.rotation import RotatedSource
from headrace.exporters.weight_source import WeightSource
from headrace.runtime.errors import CheckpointError


def checked_spec(checkpoint: Checkpoint) -> DecoderSpec:
    """Whatever can be found wrong before work starts."""
    spec = decoder_spec(checkpoint.config)
    check_tensors(spec, checkpoint.tensors)
    for rope in spec.ropes:
        rope_tables(rope, positions=1)
    tokenizer = checkpoint.tokenizer
    bos = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
    if beyond := [i for i in (*bos, *tokenizer.eos_token_ids) if i >= spec.vocab_size]:
        raise CheckpointError(
            f"{checkpoint.path}: token {beyond[0]} begins or ends texts, but the embedding has "
            f"{spec.vocab_size} rows; correct the checkpoint's configuration"
        )
    return spec


def decoder_parts(
    spec: DecoderSpec, tensors: Mapping[str, LazyTensor], precision: Precision
) -> DecoderParts:
    """Weights in the basis that the precision wants, all in float32."""
    fmt = Float32()  # until the plan says what each weight gets
    source = WeightSource(tensor_views(spec, tensors))
    rotated = RotatedSource(source, spec) if precision.rotate else None
    return DecoderParts(
        spec=spec,
        weight=(rotated or source).weight,
        vector=(rotated or source).vector,
        layer_format=fmt,
        head_format=fmt,
        kv_scales=None,
        head_matrix=None if rotated is None else rotated.head_matrix,
        plain_basis=None if rotated is None else rotated.plain_basis,
    )
