"""Quantization-aware training, as far as it needs no torch: checks before, and the result after.

The training itself is `exporters.train`; see the docstrings there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from headrace.exporters.archs.spec import DecoderSpec
from headrace.exporters.graph.decoder import DecoderParts
from headrace.exporters.graph.linear import Weight
from headrace.exporters.graph.rope import switch_tokens
from headrace.exporters.measured import FormatPlan, format_maker
from headrace.exporters.options import ExportOptions
from headrace.exporters.quant.formats import Blocks, Float, RowInt8
from headrace.exporters.rotation import stream_obstacle
from headrace.runtime.errors import ConfigError, ExportError

STATE_FILE = "state.json"
_HELD_OUT_SEQUENCES = 4
_MIN_SEQUENCES = 16
_MAX_SEQUENCE_TOKENS = 256
_WARM_UP_SHARE = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """How to train.

    Attributes:
        learning_rate: at its peak, in distances between codes a step.
        save_every: steps between states that are kept, and between judgements on held-out text.
    """

    steps: int
    sequence_tokens: int
    batch_sequences: int = 2
    learning_rate: float = 0.001
    save_every: int = 10

    def rate(self, step: int) -> float:
        """The rate of step 0, 1, ...: it rises for a tenth of the steps, then falls to zero."""
        warm_up = max(1, round(_WARM_UP_SHARE * self.steps))
        rising, falling = (step + 1) / warm_up, (self.steps - step) / max(self.steps - warm_up, 1)
        return self.learning_rate * min(1.0, rising, falling)


@dataclasses.dataclass(frozen=True, slots=True)
class TrainedWeight:
    """A checkpoint matrix after training, and what its format is to store of it (`Weight`)."""

    values: Float
    stored: RowInt8 | Blocks | None


class Training:
    """A training that has been checked and may start.

    Args:
        folder: for its state.
        identity: what decides its result.
    """

    def __init__(
        self, folder: Path, identity: Mapping[str, object], ids: list[list[int]], recipe: Recipe
    ) -> None:
        self._folder, self._identity, self._ids, self._recipe = folder, identity, ids, recipe

    def run(
        self,
        parts: DecoderParts,
        plan: FormatPlan,
        reference: Path,
        report: Callable[[str, int, int], None],
    ) -> DecoderParts:
        """The same model with trained weights, which the formats of `plan` store as they are.

        `reference` is a graph of the FP32 model.

        Raises:
            ExportError: the model cannot be trained, or its state cannot be read or written.
        """
        from headrace.exporters.train.run import train

        weights, vectors = train(
            parts,
            format_maker(plan.format_of),
            self._ids[:-_HELD_OUT_SEQUENCES],
            self._ids[-_HELD_OUT_SEQUENCES:],
            self._recipe,
            reference,
            self._folder,
            self._identity,
            lambda done: report("training", done, self._recipe.steps),
        )
        return with_trained(parts, weights, vectors)

    def finish(self) -> None:
        """Delete the state, which the package makes superfluous."""
        (self._folder / STATE_FILE).unlink(missing_ok=True)
        for file in self._folder.glob("*.safetensors"):
            file.unlink()


def prepare_training(
    options: ExportOptions,
    output: Path,
    source_sha256: Callable[[], str],
    tokenizer: Tokenizer,
    spec: DecoderSpec,
) -> Training:
    """Everything that can be found wrong before work starts.

    Raises:
        ExportError: torch is missing.
        ConfigError: the text is too short, the model has what cannot be trained,
            or the state beside `output` is of another training.
    """
    assert options.qat_text is not None
    if importlib.util.find_spec("torch") is None:
        raise ExportError(
            "--qat needs torch, which is not installed: pip install 'headrace[train]'"
        )
    size = min(_MAX_SEQUENCE_TOKENS, spec.context_tokens)
    encoded = tokenizer.encode(options.qat_text, add_special_tokens=False).ids
    ids = [i for i in encoded if i < spec.vocab_size]
    if len(ids) < _MIN_SEQUENCES * size:
        raise ConfigError(
            "qat",
            f"{len(ids)} tokens",
            f"a longer text: at least {_MIN_SEQUENCES * size} tokens, better 100,000",
        )
    if unknown := unknown_parts(spec):
        raise ConfigError("qat", spec.architecture, f"a model without {unknown[0]}")
    recipe = Recipe(options.qat_steps, size)
    identity = {
        "checkpoint": source_sha256(),
        "text": _sha256(options.qat_text),
        "calibration text": _sha256(options.calibration_text or ""),
        "precision": options.precision,
        "rules": [f"{rule.pattern}={rule.format}" for rule in options.rules],
        "recipe": dataclasses.asdict(recipe),
    }
    folder = output.with_name(f"{output.name}.qat")
    state = read_state(folder)
    if state is not None and (other := _difference(state["identity"], identity)):
        raise ConfigError(
            "qat",
            str(folder),
            f"the state of this training; its {other} is another. Finish that one first, delete "
            "the folder, or choose another output",
        )
    sequences = [ids[i : i + size] for i in range(0, len(ids) - size + 1, size)]
    return Training(folder, identity, sequences, recipe)


def unknown_parts(spec: DecoderSpec) -> list[str]:
    """What the decoder has that `train.decoder.TorchDecoder` cannot compute."""
    names = spec.layer
    missing = {
        "another norm than RMSNorm": spec.norm != "rms",
        "layers that do not normalize what they read": not (
            names.attention_norm and names.mlp_norm
        ),
        "norms of what layers add": bool(names.attention_post_norm or names.mlp_post_norm),
        "an MLP without gate": names.gate is None,
        f"the activation {spec.activation}": spec.activation != "silu",
        "learned positions": spec.positions is not None,
        "layers without rotary positions": any(a.rope is None for a in spec.attention),
        "rotary positions of two kinds": any(
            (switch_tokens(rope) or _MAX_SEQUENCE_TOKENS) < _MAX_SEQUENCE_TOKENS
            for rope in spec.ropes
        ),
        "a residual stream that cannot be rotated": stream_obstacle(spec) is not None,
        "norms across all heads": spec.wide_head_norms,
        "capped scores or logits": bool(spec.attention_softcap or spec.logits_softcap),
    }
    return [name for name, found in missing.items() if found]


def read_state(folder: Path) -> dict[str, Any] | None:
    """`state.json` of a training under way, or None.

    Raises:
        ConfigError: it cannot be understood.
    """
    file = folder / STATE_FILE
    if not file.exists():
        return None
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        kinds = {"step": int, "tensors": str, "identity": dict, "train": list, "held_out": list}
        if all(isinstance(state[name], kind) for name, kind in kinds.items()):
            return dict(state)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise ConfigError("qat", str(file), f"the state of a training; this is none, delete {folder}")


def with_trained(
    parts: DecoderParts, weights: Mapping[str, TrainedWeight], vectors: Mapping[str, Float]
) -> DecoderParts:
    """The model with other weights, which formats round to nearest; the rest is as before."""

    def weight(*names: str) -> Weight:
        plain = parts.weight(*names)
        if any(name not in weights for name in names):
            return plain
        found = [weights[name] for name in names]
        return Weight(
            plain.name,
            plain.shape,
            load=lambda: np.concatenate([trained.values for trained in found]),
            blocks=lambda: None,
            trained=lambda: _stacked([trained.stored for trained in found]),
        )

    def vector(name: str) -> Float:
        return vectors[name] if name in vectors else parts.vector(name)

    return dataclasses.replace(parts, weight=weight, vector=vector)


def _stacked(parts: Sequence[RowInt8 | Blocks | None]) -> RowInt8 | Blocks | None:
    """Parts that were trained as one, or None where they were trained in several formats."""
    rows = [part for part in parts if isinstance(part, RowInt8)]
    if len(rows) == len(parts):
        codes, scales = ([getattr(row, name) for row in rows] for name in ("codes", "scales"))
        return RowInt8(np.concatenate(codes), np.concatenate(scales))
    blocks = [part for part in parts if isinstance(part, Blocks)]
    first = blocks[0] if blocks else None
    if first is None or len(blocks) < len(parts):
        return None
    if {(part.bits, part.block_size) for part in blocks} != {(first.bits, first.block_size)}:
        return None
    zeros = [part.zero_points for part in blocks if part.zero_points is not None]
    return dataclasses.replace(
        first,
        codes=np.concatenate([part.codes for part in blocks]),
        scales=np.concatenate([part.scales for part in blocks]),
        zero_points=np.concatenate([zero.view(np.uint8) for zero in zeros]) if zeros else None,
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _difference(saved: Mapping[str, object], wanted: Mapping[str, object]) -> str | None:
    """The first thing that differs."""
    return next((name for name in wanted if saved.get(name) != wanted[name]), None)
