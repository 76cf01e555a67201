"""Training of Medusa heads on hidden states that were collected before; the model stays as it is.

A head is residual blocks before the model's own output matrix (Medusa-1 with a shared head, Cai et
al., 2024). Weights begin at zero, so that every head begins as the model's own. The loss is the sum
over heads of the cross entropy of the token that a head is to guess, times 0.8 for each place that
it lies further off. It runs over the tokens of `token_map` alone, and over targets among them: what
a head cannot choose it need not weigh.

Inputs are divided by their root mean square over the text, channel by channel, while training; the
weights that are written take them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from headrace.exporters.heads.checkpoint import Block, Head, Heads
from headrace.exporters.heads.data import NO_TARGET, HeadData
from headrace.exporters.train.adam import Adam
from headrace.exporters.train.run_folder import History, RunFolder
from headrace.runtime.errors import ExportError

RANKS = 10  # of a head's guesses whose accuracy is measured
_DECAY = 0.8
_LOSS = ("loss", "sum over heads of 0.8^k x cross entropy, nats")
_SEED = 1
_WARM_UP_STEPS = 50
_JUDGE_POSITIONS = 256  # at a time


@dataclass(frozen=True, slots=True)
class HeadRecipe:
    """How to train.

    Attributes:
        learning_rate: at its peak; it falls to zero with the last step.
        judge_every: steps between judgements on held-out texts, after each of which the state is
            kept.
        patience: judgements without a better loss after which the training ends.
    """

    num_heads: int
    num_blocks: int
    steps: int
    batch_positions: int = 256
    learning_rate: float = 0.001
    judge_every: int = 100
    patience: int = 4

    def rate(self, step: int) -> float:
        """Of step 0, 1, ..."""
        rising = (step + 1) / _WARM_UP_STEPS
        return self.learning_rate * min(rising, 1.0, (self.steps - step) / self.steps)


@dataclass(frozen=True, slots=True)
class TrainedHeads:
    """The heads of the lowest held-out loss.

    Attributes:
        accuracy: float64 [heads, RANKS], over held-out texts: how often the token that came was a
            head's guess of this rank. All targets count, those out of `token_map` as missed.
    """

    heads: Heads
    accuracy: NDArray[np.float64]
    loss: float
    steps: int


def train_heads(
    data: HeadData,
    output: NDArray[np.float32],
    recipe: HeadRecipe,
    folder: Path,
    identity: Mapping[str, object],
    report: Callable[[int], None],
) -> TrainedHeads:
    """Train until the held-out loss is flat.

    Args:
        output: rows of the model's output matrix for the tokens of `data.token_map`, float32
            [tokens, hidden].
        identity: kept with the state, see `RunFolder`.
        report: called with how many steps are done.

    Raises:
        ExportError: the state cannot be read or written.
    """
    return _Trainer(
        data, torch.from_numpy(output), recipe, RunFolder(folder, identity, _LOSS), report
    ).run()


class _Trainer:
    def __init__(
        self,
        data: HeadData,
        output: Tensor,
        recipe: HeadRecipe,
        folder: RunFolder,
        report: Callable[[int], None],
    ) -> None:
        self._data, self._output, self._recipe = data, output, recipe
        self._folder, self._report = folder, report
        self._scale = torch.from_numpy(data.scale)
        size = len(data.scale)
        self._tensors: dict[str, Tensor] = {}
        for head in range(recipe.num_heads):
            for block in range(recipe.num_blocks):
                self._tensors[f"{head}.{block}.weight"] = torch.zeros(size, size)
                self._tensors[f"{head}.{block}.bias"] = torch.zeros(size)
        self._adam = Adam(self._tensors, dict.fromkeys(self._tensors, 1.0))
        self._best = {f"best.{name}": tensor.clone() for name, tensor in self._tensors.items()}
        self._step, self.history = 0, History()
        self._order: tuple[int, NDArray[np.int64]] | None = None
        if (saved := folder.load(torch.device("cpu"))) is not None:
            self._take_up(*saved)
        for tensor in self._tensors.values():
            tensor.requires_grad_(True)

    def run(self) -> TrainedHeads:
        """Train to the end; interrupted, it goes on from the last judgement."""
        while self._step < self._recipe.steps and not self._is_flat():
            if self._step % self._recipe.judge_every == 0:
                self._judge()
            self._report(self._step)
            self._advance()
        self._judge()
        self._report(self._step)
        for name, tensor in self._tensors.items():
            tensor.data.copy_(self._best[f"best.{name}"])
        loss = min(value for _, value in self.history.held_out)
        return TrainedHeads(self._heads(), self._accuracy(), loss, self._step)

    def _advance(self) -> None:
        """One step."""
        for tensor in self._tensors.values():
            tensor.grad = None
        states, targets = self._data.batch(self._batch())
        loss = self._loss(torch.from_numpy(states), torch.from_numpy(targets))
        loss.backward()
        self._adam.step(self._step + 1, self._recipe.rate(self._step))
        self.history.train.append(float(loss.detach()))
        self._step += 1

    def _loss(self, states: Tensor, targets: Tensor) -> Tensor:
        """Weighted sum over heads of the mean cross entropy, nats.

        Args:
            targets: int64 [n, heads], places in `token_map`; negative ones are left out.
        """
        total = torch.zeros(())
        for head in range(self._recipe.num_heads):
            wanted = targets[:, head]
            among = wanted >= 0
            if not bool(among.any()):
                continue
            logits = self._state_of(head, states[among]) @ self._output.T
            total = total + _DECAY**head * functional.cross_entropy(logits, wanted[among])
        return total

    def _state_of(self, head: int, states: Tensor) -> Tensor:
        """What the head's output matrix is multiplied with."""
        for block in range(self._recipe.num_blocks):
            weight = self._tensors[f"{head}.{block}.weight"]
            bias = self._tensors[f"{head}.{block}.bias"]
            states = states + functional.silu(functional.linear(states / self._scale, weight, bias))
        return states

    def _batch(self) -> NDArray[np.int64]:
        """Positions of this step: every epoch takes all once, in an order of its own."""
        count, size = self._data.num_train, self._recipe.batch_positions
        taken = []
        for number in range(self._step * size, (self._step + 1) * size):
            epoch, place = divmod(number, count)
            if self._order is None or self._order[0] != epoch:
                self._order = epoch, np.random.default_rng((_SEED, epoch)).permutation(count)
            taken.append(self._order[1][place])
        return np.array(taken)

    def _is_flat(self) -> bool:
        losses = [loss for _, loss in self.history.held_out]
        return (
            len(losses) - 1 - int(np.argmin(losses)) >= self._recipe.patience if losses else False
        )

    def _judge(self) -> None:
        """The loss on held-out texts; the state and the best weights are kept."""
        done = [entry for entry in self.history.held_out if entry[0] < self._step]
        losses = []
        with torch.no_grad():
            for states, targets in self._data.held_out(_JUDGE_POSITIONS):
                losses.append(
                    float(self._loss(torch.from_numpy(states), torch.from_numpy(targets)))
                )
        loss = float(np.mean(losses))
        if not done or loss < min(value for _, value in done):
            for name, tensor in self._tensors.items():
                self._best[f"best.{name}"] = tensor.detach().clone()
        self.history.held_out = [*done, (self._step, loss)]
        self._folder.save(
            self._step, self.history, self._tensors | self._adam.averages | self._best
        )

    def _accuracy(self) -> NDArray[np.float64]:
        heads = self._recipe.num_heads
        right, counted = np.zeros((heads, RANKS)), np.zeros(heads)
        ranks = min(RANKS, len(self._output))
        with torch.no_grad():
            for states, targets in self._data.held_out(_JUDGE_POSITIONS):
                for head in range(heads):
                    here = targets[:, head] != NO_TARGET
                    logits = self._state_of(head, torch.from_numpy(states[here])) @ self._output.T
                    guesses = logits.topk(ranks, dim=-1).indices.numpy()
                    hits = guesses == targets[here, head][:, None]
                    right[head, :ranks] += hits.sum(0)
                    counted[head] += here.sum()
        return right / counted[:, None]

    def _heads(self) -> Heads:
        scale = self._data.scale
        blocks = [
            tuple(
                Block(
                    self._tensors[f"{head}.{block}.weight"].detach().numpy() / scale,
                    self._tensors[f"{head}.{block}.bias"].detach().numpy(),
                )
                for block in range(self._recipe.num_blocks)
            )
            for head in range(self._recipe.num_heads)
        ]
        return Heads(tuple(map(Head, blocks)), self._data.token_map)

    def _take_up(self, step: int, history: History, tensors: dict[str, Tensor]) -> None:
        here = self._tensors | self._adam.averages | self._best
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        if shapes != {name: tensor.shape for name, tensor in here.items()}:
            raise ExportError("the saved training is of other heads; delete its folder")
        for name, tensor in here.items():
            tensor.copy_(tensors[name])
        self._step, self.history = step, history
