"""One training from start to end: models, data, device; what `exporters.qat` calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from headrace.exporters.graph.decoder import DecoderParts
from headrace.exporters.graph.linear import Float32, LinearFormat
from headrace.exporters.qat import Recipe, TrainedWeight
from headrace.exporters.quant.formats import Float
from headrace.exporters.train.decoder import TorchDecoder
from headrace.exporters.train.loop import Trainer
from headrace.exporters.train.run_folder import RunFolder
from headrace.exporters.validate import GraphRunner
from headrace.runtime.errors import ExportError
from headrace.runtime.fidelity import log_softmax, mean_kl_nats

_SAME_NATS = 0.02  # the reference of a large model has weights in 8 bits


def train(
    parts: DecoderParts,
    choose: Callable[[str], LinearFormat],
    token_ids: Sequence[Sequence[int]],
    held_out: Sequence[Sequence[int]],
    recipe: Recipe,
    reference: Path,
    folder: Path,
    identity: Mapping[str, object],
    report: Callable[[int], None],
) -> tuple[dict[str, TrainedWeight], dict[str, Float]]:
    """Trained matrices and vectors by checkpoint name.

    Runs on the first CUDA card where there is one.

    Args:
        token_ids: sequences of equal length; `held_out` likewise, to judge on.
        reference: a graph of the FP32 model.
        identity: kept with the state, see `RunFolder`.

    Raises:
        ExportError: the model has what `TorchDecoder` does not know, or its state cannot be read or
            written.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    student = TorchDecoder(parts, choose, recipe.sequence_tokens, device)
    exact = Float32()
    teacher = TorchDecoder(parts, lambda _: exact, recipe.sequence_tokens, device)
    _check_teacher(teacher, reference, held_out[0])
    trainer = Trainer(
        student,
        teacher,
        torch.tensor(token_ids, device=device),
        torch.tensor(held_out, device=device),
        recipe,
        RunFolder(folder, identity),
        report,
    )
    trainer.run()
    return folded(student)


def _check_teacher(teacher: TorchDecoder, reference: Path, ids: Sequence[int]) -> None:
    """Whether torch computes what the FP32 graph does; an architecture may have something new."""
    expected = GraphRunner(reference, len(ids)).run(list(ids))
    with torch.no_grad():
        logits = teacher.logits(torch.tensor([list(ids)], device=teacher.device))[0].cpu().numpy()
    nats = mean_kl_nats(log_softmax(expected), log_softmax(logits))
    if not nats < _SAME_NATS:
        raise ExportError(
            f"architecture {teacher.spec.architecture} cannot be trained: torch and ONNX Runtime "
            f"compute its logits {nats:.3g} nats apart; export without --qat"
        )


def folded(decoder: TorchDecoder) -> tuple[dict[str, TrainedWeight], dict[str, Float]]:
    """What packages are to hold, stacked weights in their parts."""
    weights = {}
    for name, linear in decoder.linears.items():
        values, stored = linear.folded()
        start = 0
        for part in name.split("+"):
            rows = slice(start, start + decoder.outputs_of(part))
            weights[part] = TrainedWeight(
                values[rows], None if stored is None else stored.rows(rows)
            )
            start = rows.stop
    vectors = {
        name: np.array(vector.detach().cpu().numpy(), np.float32)
        for name, vector in decoder.vectors.items()
    }
    return weights, vectors
