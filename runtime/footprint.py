"""What packages take of memory once they are loaded, and how they share a budget of it.

It is known before anything is loaded: the manifest has the sizes of weights and of a token's keys
and values, and what comes on top was measured. Rather too much than too little.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from headrace.runtime.config import EngineConfig
from headrace.runtime.encoder.manifest import EncoderTargetInfo
from headrace.runtime.manifest import ModelInfo, TargetInfo, TensorInfo

# The share of weights that ONNX Runtime keeps a second time, arranged for its kernels, by the end
# of their format's name. SmolLM2-135M takes 132 MiB more than its 515 of weights in FP32 (a matrix
# that is embedding and head), 84 more than 146 in blocks of 8 bits, 26 more than 133 in rows, and,
# with 47 MiB in blocks of 4 bits, 36.
_COPIED = {"fp32": 0.25, "_row": 0.0, "/8bit": 0.5, "/4bit": 0.25}
_COPIED_OTHERWISE = 0.5
# Tokenizer and graph (26 MiB), activations of steps (31 to 62 with 16 sequences), notes for drafts.
_FIXED_BYTES = 100 * 2**20
_LOGITS_PER_SLOT = 16  # rows
_LOGITS_BYTES = 8  # logits and probabilities, of each token of the vocabulary
_ENCODER_SESSIONS = 2  # for one call on all threads, and for calls side by side


@dataclass(frozen=True, slots=True)
class Footprint:
    """Of one package.

    Attributes:
        fixed_bytes: all but keys and values.
        token_bytes: keys and values of a token, those of a draft model included; 0 where there is
            no cache.
        least_tokens: of one sequence as long as the context.
        most_tokens: of as many as there are slots.
        kv_token_bytes: of `token_bytes`, what is the model's own.
    """

    fixed_bytes: int
    token_bytes: int = 0
    least_tokens: int = 0
    most_tokens: int = 0
    kv_token_bytes: int = 0

    @property
    def least_bytes(self) -> int:
        """With room for one sequence."""
        return self.need_bytes(self.least_tokens)

    def need_bytes(self, num_tokens: int) -> int:
        """With room for keys and values of so many tokens."""
        return self.fixed_bytes + num_tokens * self.token_bytes

    def with_draft(self, draft: Footprint) -> Footprint:
        """With a draft model, which holds as many tokens."""
        return replace(
            self,
            fixed_bytes=self.fixed_bytes + draft.fixed_bytes,
            token_bytes=self.token_bytes + draft.token_bytes,
        )


def decoder_footprint(model: ModelInfo, target: TargetInfo, config: EngineConfig) -> Footprint:
    """Of a target for the CPU."""
    context = min(model.context_tokens, config.context_tokens or model.context_tokens)
    slots, token_bytes = config.max_sequences, target.kv_cache.bytes_per_token
    heads_bytes = 0 if target.heads is None else target.heads.weight_bytes
    logits_bytes = slots * _LOGITS_PER_SLOT * model.vocab_size * _LOGITS_BYTES
    return Footprint(
        fixed_bytes=target.weight_bytes
        + _copied_bytes(target.tensors)
        + heads_bytes
        + logits_bytes
        + _FIXED_BYTES,
        token_bytes=token_bytes,
        least_tokens=context,
        most_tokens=context * slots,
        kv_token_bytes=token_bytes,
    )


def encoder_footprint(target: EncoderTargetInfo) -> Footprint:
    """Of a target for the CPU."""
    session_bytes = target.weight_bytes + _copied_bytes(target.tensors)
    return Footprint(_ENCODER_SESSIONS * session_bytes + _FIXED_BYTES)


def divide(footprints: Sequence[Footprint], budget_bytes: int) -> list[int]:
    """How many tokens of keys and values each gets: those of one sequence, and equal parts of what
    the budget leaves beside as many of the largest as it holds together.

    So whatever was together in the budget with room for one sequence each still is.

    Args:
        budget_bytes: at least `least_bytes` of each.
    """
    sizes = sorted((one.least_bytes for one in footprints), reverse=True)
    together = [taken for taken in accumulate(sizes) if taken <= budget_bytes]
    spare_bytes = (budget_bytes - together[-1]) // len(together)
    return [
        min(one.most_tokens, one.least_tokens + spare_bytes // one.token_bytes)
        if one.token_bytes
        else 0
        for one in footprints
    ]


def _copied_bytes(tensors: Iterable[TensorInfo]) -> int:
    return int(sum(_copied_share(tensor.format) * tensor.bytes for tensor in tensors))


def _copied_share(name: str) -> float:
    known = (share for ending, share in _COPIED.items() if name.endswith(ending))
    return next(known, _COPIED_OTHERWISE)
