"""Where a training keeps its state, so that it can be taken up again: safetensors and JSON.

    DIR.qat/
      state.json                 what the training is of, its step, its losses, its tensors' file
      state-STEP.safetensors     trained tensors, their averages, Adam's, zero points
      loss.csv, loss.svg         losses so far

`state.json` is replaced last and in one go, so an interrupted save leaves the state before it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.exporters.qat import STATE_FILE, read_state
from headrace.exporters.train.loss_plot import loss_csv, loss_svg
from headrace.runtime.errors import ExportError

KL_LOSS = ("kl", "mean KL to the FP32 model, nats")


@dataclass(slots=True)
class History:
    """Losses by step, nats.

    `train` has one for each step; `held_out` pairs of steps done and the loss then.
    """

    train: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)


class RunFolder:
    """The folder of one training.

    Args:
        identity: what the training is of; kept to be compared.
        loss: its name in the table and its title in the drawing.
    """

    def __init__(
        self, folder: Path, identity: Mapping[str, object], loss: tuple[str, str] = KL_LOSS
    ) -> None:
        self._folder, self._identity, self._loss = folder, dict(identity), loss

    def save(self, step: int, history: History, tensors: Mapping[str, Tensor]) -> None:
        """Replace the state.

        Raises:
            ExportError: the folder cannot be written.
        """
        name = f"state-{step}.safetensors"
        state = {"step": step, "tensors": name, "identity": self._identity, **asdict(history)}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            detached = {n: t.detach().contiguous() for n, t in tensors.items()}
            partial = self._folder / "partial.safetensors"
            save_file(detached, partial)
            partial.replace(self._folder / name)
            self._replace(STATE_FILE, json.dumps(state))
            for old in self._folder.glob("state-*.safetensors"):
                if old.name != name:
                    old.unlink()
            self._replace("loss.csv", loss_csv(history.train, history.held_out, self._loss[0]))
            self._replace("loss.svg", loss_svg(history.train, history.held_out, self._loss[1]))
        except (OSError, SafetensorError) as error:
            raise ExportError(f"cannot write {self._folder}: {error}") from None

    def load(self, device: torch.device) -> tuple[int, History, dict[str, Tensor]] | None:
        """What was saved last, or None.

        Raises:
            ExportError: it is damaged.
        """
        state = read_state(self._folder)
        if state is None:
            return None
        file = self._folder / Path(str(state["tensors"])).name
        try:
            tensors: dict[str, Tensor] = load_file(file, device=str(device))
        except (OSError, SafetensorError) as error:
            raise ExportError(f"{file} is damaged ({error}); delete {self._folder}") from None
        held_out = [(int(step), float(loss)) for step, loss in state["held_out"]]
        return int(state["step"]), History(list(state["train"]), held_out), tensors

    def _replace(self, name: str, text: str) -> None:
        partial = self._folder / f"{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(self._folder / name)
