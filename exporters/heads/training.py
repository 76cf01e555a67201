"""`runtime-export train-heads`: collect, train, write, and say how good the heads are.

The training itself, which needs torch, is `exporters.train.heads`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.exporters.graph.decoder import DecoderParts
from headrace.exporters.heads.add import open_package_source, package_parts
from headrace.exporters.heads.checkpoint import write_heads
from headrace.exporters.heads.data import head_data
from headrace.exporters.heads.wanted import Wanted
from headrace.exporters.qat import read_state
from headrace.runtime.errors import ConfigError, ExportError, PackageError
from headrace.runtime.manifest import file_sha256, package_path, read_manifest
from headrace.runtime.text_files import read_text

REPORT_FILE = "training.json"
# Of the authors' heads on Vicuna 7B (medusa_acc.csv in their repository): top-1 and top-5 accuracy
# on the data that they were trained on.
PAPER_ACCURACY = ((0.560, 0.780), (0.316, 0.563), (0.201, 0.417), (0.147, 0.340), (0.118, 0.300))
_MIN_POSITIONS = 64

Float = NDArray[np.float32]
Report = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions:
    """What to train.

    Attributes:
        map_size: tokens that heads choose among.
        steps: at most; the training ends before where the held-out loss is flat.
    """

    num_heads: int = 4
    num_blocks: int = 1
    map_size: int = 4096
    steps: int = 2000

    def __post_init__(self) -> None:
        for field, most in (("num_heads", 16), ("num_blocks", 4), ("map_size", 2**31)):
            if not 1 <= getattr(self, field) <= most:
                raise ConfigError(field, getattr(self, field), f"a number from 1 to {most}")
        if self.steps < 1:
            raise ConfigError("steps", self.steps, "a number above 0")


def read_prompts(path: Path) -> tuple[str, ...]:
    """First messages of conversations: lines `{"turns": [...]}`, as in Spec-Bench and MT-Bench.

    Raises:
        ConfigError: the file is none of that kind.
    """
    found = []
    for number, line in enumerate(read_text(path, "prompts").splitlines(), 1):
        try:
            found.append(json.loads(line)["turns"][0])
        except (ValueError, KeyError, IndexError, TypeError):
            found.append(None)
        if not isinstance(found[-1], str):
            raise ConfigError("prompts", f"{path}:{number}", 'a line {"turns": ["message", ...]}')
    return tuple(found)


def train_package_heads(
    source: Path,
    package: Path,
    output: Path,
    wanted: Wanted,
    options: HeadOptions,
    report: Report,
) -> dict[str, Any]:
    """Train heads for a package and write them to `output`; what was kept of the training.

    What is collected and the state are in a folder beside it, `OUTPUT.train`, so that the same
    call goes on after an interruption.

    Raises:
        ConfigError: that folder is of another training.
        CheckpointError, PackageError: source or package cannot be used.
        ExportError: torch is missing, there is too little to learn from, or files cannot be
            written.
    """
    if importlib.util.find_spec("torch") is None:
        raise ExportError(
            "train-heads needs torch, which is not installed: pip install 'headrace[train]'"
        )
    manifest = read_manifest(package)
    cpu = [target for target in manifest.targets if target.device == "cpu"]
    if not cpu:
        raise PackageError(f"{package} has no CPU target, whose states heads learn from")
    folder = output.with_name(f"{output.name}.train")
    identity = {
        "package": file_sha256(package_path(package, cpu[0].graphs[0].file)),
        "checkpoint": manifest.source.sha256,
        "texts": hashlib.sha256(json.dumps(dataclasses.astuple(wanted)).encode()).hexdigest(),
        "options": dataclasses.asdict(options),
    }
    _check_folder(folder, identity)
    from headrace.exporters.heads.collect import collect  # loads the engine

    with open_package_source(source, package, manifest) as checkpoint:
        parts = package_parts(checkpoint, cpu[0])
        collected = collect(package, wanted, folder, report)
        vocab_size, basis = parts.spec.vocab_size, _to_plain(parts)
        data = head_data(
            collected, options.num_heads, options.map_size, vocab_size, wanted.answers, basis
        )
        if data.num_train < _MIN_POSITIONS or not data.num_held_out:
            raise ExportError(
                f"{len(collected.tokens)} tokens are too little to train heads on; give more "
                "prompts or a longer text"
            )
        from headrace.exporters.train.heads import HeadRecipe, train_heads

        trained = train_heads(
            data,
            _output_rows(parts, data.token_map),
            HeadRecipe(options.num_heads, options.num_blocks, options.steps),
            folder,
            identity,
            lambda done: report("training heads", done, options.steps),
        )
    heads = dataclasses.replace(trained.heads, base_model=manifest.source.file)
    write_heads(output, heads)
    kept = {
        **identity,
        "tokens": len(collected.tokens),
        "steps": trained.steps,
        "held_out_loss": trained.loss,
        "accuracy_by_rank": trained.accuracy.tolist(),
    }
    (output / REPORT_FILE).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return kept


def accuracy_lines(kept: dict[str, Any]) -> list[str]:
    """Top-1 and top-5 accuracy of each head, beside the authors'."""
    lines = [
        f"{kept['tokens']} tokens, {kept['steps']} steps, held-out loss "
        f"{kept['held_out_loss']:.3f} nats"
    ]
    for number, ranks in enumerate(kept["accuracy_by_rank"]):
        text = f"head {number + 1}: top-1 {ranks[0]:.1%}, top-5 {sum(ranks[:5]):.1%}"
        if number < len(PAPER_ACCURACY):
            first, fifth = PAPER_ACCURACY[number]
            text += f" (Vicuna 7B: {first:.1%}, {fifth:.1%})"
        lines.append(text)
    return lines


def _check_folder(folder: Path, identity: dict[str, Any]) -> None:
    """Claim the folder for this training, or see that it is of this one."""
    file = folder / "identity.json"
    try:
        state = read_state(folder)
        found = state["identity"] if state else json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        found = None
    except ValueError:
        found = "damaged"
    if found is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(identity), encoding="utf-8")
        except OSError as error:
            raise ExportError(f"cannot write {folder}: {error}") from None
    elif found != identity:
        raise ConfigError(
            "output",
            str(folder),
            "the state of this training; it is of another. Finish that one first, delete the "
            "folder, or choose another output",
        )


def _to_plain(parts: DecoderParts) -> Float | None:
    """What states of the graph are multiplied with to get those of the checkpoint."""
    if parts.plain_basis is None:
        return None
    basis = parts.plain_basis()[0]
    matrix = None if parts.head_matrix is None else parts.head_matrix()
    return np.asarray(basis if matrix is None else matrix @ basis, np.float32)


def _output_rows(parts: DecoderParts, token_map: NDArray[np.int64]) -> Float:
    """The model's output matrix for states of the checkpoint, some rows of it."""
    rows = parts.weight(parts.spec.head).load()[token_map] * np.float32(parts.spec.logits_scale)
    if parts.plain_basis is not None:
        rows = rows @ parts.plain_basis()[1].T
    return np.ascontiguousarray(rows, np.float32)
