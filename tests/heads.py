"""Random Medusa heads, a slow twin of their graph, and heads that know a certain text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.exporters.heads.add import open_package_source, package_parts
from headrace.exporters.heads.checkpoint import Block, Head, Heads
from headrace.exporters.validate import GraphRunner
from headrace.runtime.manifest import HIDDEN, read_manifest

Float = NDArray[np.float64]


def random_heads(
    *,
    hidden: int = 64,
    vocab: int = 256,
    num_heads: int = 3,
    num_blocks: int = 1,
    own_outputs: bool = False,
    token_map: NDArray[np.int64] | None = None,
    seed: int = 0,
) -> Heads:
    """Heads that change states a good deal."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int) -> NDArray[np.float32]:
        return np.asarray(rng.standard_normal((rows, hidden)) / np.sqrt(hidden), np.float32)

    heads = []
    for _ in range(num_heads):
        blocks = [
            Block(matrix(hidden), 0.1 * rng.standard_normal(hidden).astype(np.float32))
            for _ in range(num_blocks)
        ]
        heads.append(Head(tuple(blocks), 4 * matrix(vocab) if own_outputs else None))
    return Heads(tuple(heads), token_map, "random")


def probabilities_of(heads: Heads, states: Float, output: Float) -> Float:
    """What the heads mean, [heads, states, vocab]; 0 for tokens that are not in their map.

    Args:
        states: of the checkpoint, [n, hidden].
        output: the model's output matrix, [vocab, hidden].
    """
    found = np.zeros((len(heads.heads), len(states), len(output)))
    tokens = np.arange(len(output)) if heads.token_map is None else heads.token_map
    for number, head in enumerate(heads.heads):
        x = states
        for block in head.blocks:
            inner = x @ block.weight.T + block.bias
            x = x + inner / (1 + np.exp(-inner))
        logits = x @ (output if head.output is None else head.output)[tokens].T
        weights = np.exp(logits - logits.max(1, keepdims=True))
        found[number][:, tokens] = weights / weights.sum(1, keepdims=True)
    return found


def plain_states(checkpoint: Path, package: Path, states: NDArray[np.float32]) -> Float:
    """States that a package's graph gave, in the basis of its checkpoint."""
    manifest = read_manifest(package)
    with open_package_source(checkpoint, package, manifest) as source:
        parts = package_parts(source, manifest.targets[0])
        x = states.astype(np.float64)
        if parts.head_matrix is not None:
            x = x @ parts.head_matrix()
        return x if parts.plain_basis is None else x @ parts.plain_basis()[0]


def heads_that_know(
    checkpoint: Path,
    package: Path,
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    num_heads: int = 3,
    vocab: int = 256,
) -> Heads:
    """Heads of a package that guess most of one answer: own output matrices, solved for what
    follows each state of it, of which there must be fewer than `hidden`."""
    text = [*prompt, *answer]
    runner = GraphRunner(next(package.glob("*/ragged.onnx")), len(text))
    states = plain_states(checkpoint, package, runner.append(text)[HIDDEN][len(prompt) - 1 :])
    hidden = states.shape[1]
    nothing = Block(np.zeros((hidden, hidden), np.float32), np.zeros(hidden, np.float32))
    found = []
    for number in range(num_heads):
        # The state of place i gives token i of the answer; head 0 guesses token i + 1.
        wanted = np.eye(vocab)[list(answer[1 + number :])]
        solved = np.linalg.lstsq(states[: len(wanted)], wanted, rcond=0.03)[0]
        found.append(Head((nothing,), (8 * solved.T).astype(np.float32)))
    return Heads(tuple(found), None, "fitted")
