"""The training: mean KL from the FP32 model's next-token distributions to the rounded model's.

The data are the FP32 model's own opinions on a text (self-distillation, Hinton et al., 2015), so
what is learned is to round, not the text. Behind each layer the residual stream is compared, too,
which tells every layer about its own error (as FitNets do, Romero et al., 2015).

What is judged and kept is an average of the trained tensors over the last steps.

Whatever a step does follows from its number and from the state before it; a training that is
interrupted and taken up gives the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from headrace.exporters.qat import Recipe
from headrace.exporters.train.adam import Adam
from headrace.exporters.train.average import RunningAverage
from headrace.exporters.train.decoder import TorchDecoder
from headrace.exporters.train.run_folder import History, RunFolder
from headrace.runtime.errors import ExportError

_SEED = 1
# Of the residual stream's error beside the KL. Gradients of two batches of 512 tokens of SmolLM2
# have a cosine of 0.05 to 0.09 for the KL and of 0.3 to 0.4 for this.
_STREAM_WEIGHT = 20.0
_AVERAGE_DECAY = 0.9
_SHARED_PARAMETERS = 0.5  # rate of scales and gains, which many products share, against weights'


class Trainer:
    """Trains a rounded decoder towards a float32 one.

    Args:
        token_ids: int64 [sequences, tokens]; `held_out` likewise, to judge on.
        report: called with how many steps are done.
    """

    def __init__(
        self,
        student: TorchDecoder,
        teacher: TorchDecoder,
        token_ids: Tensor,
        held_out: Tensor,
        recipe: Recipe,
        folder: RunFolder,
        report: Callable[[int], None],
    ) -> None:
        self._student, self._teacher, self._recipe = student, teacher, recipe
        self._ids, self._held_out = token_ids, held_out
        self._folder, self._report = folder, report
        self._trained = student.trained()
        self._adam = Adam(self._trained, self._units())
        self._average = RunningAverage(self._trained, _AVERAGE_DECAY)
        self._step, self.history = 0, History()
        self._moving = False
        if (saved := folder.load(token_ids.device)) is not None:
            self._take_up(*saved)
        for tensor in self._trained.values():
            tensor.requires_grad_(True)

    def run(self) -> History:
        """Train to the end, and leave the averages in the student.

        Interrupted between two moves, the state is saved first.
        """
        try:
            while self._step < self._recipe.steps:
                if self._step % self._recipe.save_every == 0:
                    self._judge()
                    self._save()
                self._report(self._step)
                self._advance()
        except (KeyboardInterrupt, SystemExit):
            if not self._moving:
                self._save()
            raise
        self._judge()
        self._save()
        self._report(self._step)
        self._average.swap()
        return self.history

    def _advance(self) -> None:
        """One step."""
        for tensor in self._trained.values():
            tensor.grad = None
        nats, error = self._losses(self._batch())
        (nats + _STREAM_WEIGHT * error).backward()
        value = float(nats.detach())
        self._moving = True  # a state half way between two steps must not be saved
        self._adam.step(self._step + 1, self._recipe.rate(self._step))
        self._average.follow(self._step + 1)
        self.history.train.append(value)
        self._step += 1
        self._moving = False

    def _losses(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Mean KL in nats, and the mean relative squared error of the residual stream."""
        with torch.no_grad():
            exact = self._teacher.states(token_ids)
            log_p = functional.log_softmax(self._teacher.head(exact[-1]), -1).flatten(0, 1)
        states = self._student.states(token_ids)
        log_q = functional.log_softmax(self._student.head(states[-1]), -1).flatten(0, 1)
        errors = [
            ((state - target).square().sum(-1) / target.square().sum(-1)).mean()
            for state, target in zip(states, exact, strict=True)
        ]
        nats = functional.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
        return nats, torch.stack(errors).mean()

    def _units(self) -> dict[str, float]:
        """What the learning rate is relative to: a step of the grid; the size of other tensors."""
        units = {n: _SHARED_PARAMETERS * _size(t) for n, t in self._trained.items()}
        for name, linear in self._student.linears.items():
            grid = linear.weight if linear.scales is None else linear.scales
            units[f"{name}.weight"] = _size(grid)
        return units

    def _batch(self) -> Tensor:
        """Sequences of this step: every epoch takes all once, in an order of its own."""
        count, size = len(self._ids), self._recipe.batch_sequences
        taken = []
        for number in range(self._step * size, (self._step + 1) * size):
            epoch, place = divmod(number, count)
            taken.append(int(np.random.default_rng((_SEED, epoch)).permutation(count)[place]))
        return self._ids[taken]

    def _judge(self) -> None:
        with self._averages_in_place(), torch.no_grad():
            loss = float(self._losses(self._held_out)[0])
        done = [entry for entry in self.history.held_out if entry[0] < self._step]
        self.history.held_out = [*done, (self._step, loss)]

    @contextmanager
    def _averages_in_place(self) -> Iterator[None]:
        self._moving = True  # half swapped tensors must not be saved either
        self._average.swap()
        try:
            yield
        finally:
            self._average.swap()
            self._moving = False

    def _state(self) -> dict[str, Tensor]:
        averages = self._adam.averages | self._average.averages
        return self._trained | averages | self._student.fixed()

    def _save(self) -> None:
        self._folder.save(self._step, self.history, self._state())

    def _take_up(self, step: int, history: History, tensors: dict[str, Tensor]) -> None:
        here = self._state()
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        if shapes != {name: tensor.shape for name, tensor in here.items()}:
            raise ExportError("the saved training is of another model; delete its folder")
        for name, tensor in here.items():
            tensor.copy_(tensors[name])
        self._step, self.history = step, history


def _size(tensor: Tensor) -> float:
    """Root mean square, or for zeros something small."""
    return float(tensor.detach().square().mean().sqrt()) or 1e-3
