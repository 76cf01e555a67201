"""From collected texts to what heads learn: states, and the tokens that they are to guess."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.exporters.heads.wanted import Collected

NO_TARGET = -1  # the text ends before
OTHER_TOKEN = -2  # not one of `token_map`
_HELD_OUT_EVERY = 10  # runs
_SAMPLE = 4096  # states whose size is measured

Float = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class HeadData:
    """Positions of many texts; one run of texts in ten is held out.

    Attributes:
        token_map: int64, rising: the tokens that heads choose among.
        scale: float32 [hidden], root mean square of each channel of the states.
        num_train: positions to train on.
    """

    token_map: NDArray[np.int64]
    scale: Float
    num_train: int
    _collected: Collected
    _basis: Float | None
    _targets: NDArray[np.int64]
    _train: NDArray[np.int64]
    _held_out: NDArray[np.int64]

    @property
    def num_held_out(self) -> int:
        return len(self._held_out)

    def batch(self, numbers: NDArray[np.int64]) -> tuple[Float, NDArray[np.int64]]:
        """States float32 [n, hidden] and targets int64 [n, heads] of training positions.

        A target is a place in `token_map`, or one of the negative marks of this module.
        """
        return self._take(self._train[numbers])

    def held_out(self, size: int) -> Iterator[tuple[Float, NDArray[np.int64]]]:
        """The held-out positions, `size` at a time."""
        for start in range(0, len(self._held_out), size):
            yield self._take(self._held_out[start : start + size])

    def _take(self, positions: NDArray[np.int64]) -> tuple[Float, NDArray[np.int64]]:
        return _plain(self._collected, positions, self._basis), self._targets[positions]


def head_data(
    collected: Collected,
    num_heads: int,
    map_size: int,
    vocab_size: int,
    run_texts: int,
    basis: Float | None,
) -> HeadData:
    """Arrange collected texts.

    Args:
        map_size: how many tokens heads choose among: those that the texts have most often.
        run_texts: texts one after the other that belong together: answers to one prompt.
        basis: float32 [hidden, hidden] that the graph's states are multiplied with to get those of
            the checkpoint; None where they are these.
    """
    tokens, starts = collected.tokens, collected.starts
    counts = np.bincount(tokens, minlength=vocab_size)
    token_map = np.sort(np.argsort(-counts, kind="stable")[:map_size])
    place = np.full(vocab_size, OTHER_TOKEN, np.int64)
    place[token_map] = np.arange(len(token_map))
    targets = np.full((len(tokens), num_heads), NO_TARGET, np.int64)
    held_out = np.zeros(len(tokens), bool)
    for number, (start, end) in enumerate(itertools.pairwise(starts)):
        # The state of a token gives that token itself; head 0 guesses the one behind it.
        for head in range(min(num_heads, end - start - 1)):
            targets[start : end - 1 - head, head] = place[tokens[start + 1 + head : end]]
        held_out[start:end] = number // run_texts % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1
    usable = targets[:, 0] != NO_TARGET
    train = np.flatnonzero(usable & ~held_out)
    sample = np.random.default_rng(0).choice(train, min(_SAMPLE, len(train)), replace=False)
    scale = np.sqrt(np.square(_plain(collected, np.sort(sample), basis)).mean(0)) + 1e-6
    return HeadData(
        token_map,
        scale.astype(np.float32),
        len(train),
        collected,
        basis,
        targets,
        train,
        np.flatnonzero(usable & held_out),
    )


def _plain(collected: Collected, positions: NDArray[np.int64], basis: Float | None) -> Float:
    states = collected.states[positions].astype(np.float32)
    return states if basis is None else states @ basis
