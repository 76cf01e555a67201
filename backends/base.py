"""The seam between the engine and a device: four methods and one frozen description.

A backend owns KV storage and the model; the scheduler owns which token goes where. A step is
given as a `StepPlan` and answered by a `StepOutput`. `submit` may return before the work is done;
`collect` waits for it. Steps are collected in the order they were submitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.runtime.core import StepPlan
from headrace.runtime.manifest import PROBABILITY_BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a loaded backend can do. Differences between devices are data, read from here.

    Attributes:
        name: of the backend, for messages.
        vocab_size: columns of the logits.
        context_tokens: most tokens that one sequence may come to.
        max_slots: sequences that can be in flight.
        max_row_tokens: most new tokens in one row (a prompt chunk).
        kv_bytes_per_token: over all layers.
        kv_budget_tokens: tokens of KV that fit this process's memory, over all slots.
        exact_rows: a row's logits are the same bits whatever its company and chunking.
        kv_identity: backends that agree in it can read each other's KV: of the same weights, in the
            same layout.
        hidden_size: of the hidden states that outputs carry; 0 where they carry none.
    """

    name: str
    vocab_size: int
    context_tokens: int
    max_slots: int
    max_row_tokens: int
    kv_bytes_per_token: int
    kv_budget_tokens: int
    exact_rows: bool
    kv_identity: str
    hidden_size: int = 0


@dataclass(frozen=True, slots=True)
class Probabilities:
    """Next-token probabilities of some rows, float32, vocabulary in blocks of PROBABILITY_BLOCK.

    Attributes:
        values: [n, vocab] padded with zeros to whole blocks.
        block_maxima: [n, blocks].
        block_sums: [n, blocks].
    """

    values: NDArray[np.float32]
    block_maxima: NDArray[np.float32]
    block_sums: NDArray[np.float32]

    @classmethod
    def empty(cls, num_rows: int, vocab_size: int) -> Probabilities:
        """Room for rows; pages come into being where they are written to."""
        blocks = -(-vocab_size // PROBABILITY_BLOCK)
        widths = (blocks * PROBABILITY_BLOCK, blocks, blocks)
        return cls(*(np.empty((num_rows, width), np.float32) for width in widths))

    def rows(self, where: int | slice) -> Probabilities:
        """A view of some rows; of one by its index, without the leading dimension."""
        return Probabilities(self.values[where], self.block_maxima[where], self.block_sums[where])

    def assign(self, where: slice, other: Probabilities) -> None:
        self.values[where] = other.values
        self.block_maxima[where] = other.block_maxima
        self.block_sums[where] = other.block_sums


class StepOutput(NamedTuple):
    """What the model said about one step.

    Attributes:
        logits: float32 [num_logits, vocab], rows in plan order and, within a row, in token
            order. Owned by the backend, may be written to, valid until the next `submit`.
        entropy_nats: float32 [num_logits], of softmax(logits).
        model_ms: wall time inside the model.
        probabilities: [num_logits, .], softmax(logits * inverse_temperature) of the rows that have
            one, anything for others; None where no row has or the backend does not compute them.
            Valid as long as the logits.
        kv_reads: what the plan's `KvRead` operations asked for, in their order;
            `num_tokens * kv_bytes_per_token` bytes each.
        hidden: float32 [num_logits, hidden], the states that the logits were made from; None where
            `Capabilities.hidden_size` is 0. Valid as long as the logits.
    """

    logits: NDArray[np.float32]
    entropy_nats: NDArray[np.float32]
    model_ms: float
    probabilities: Probabilities | None = None
    kv_reads: tuple[bytes, ...] = ()
    hidden: NDArray[np.float32] | None = None


class Backend(Protocol):
    """A device that runs steps. A fifth method needs a design note in docs/architecture.md."""

    def load(self) -> Capabilities:
        """Load the model and reserve KV address space.

        Raises:
            PackageError: the package has no graph for this backend or a file is damaged.
            BackendUnavailableError: the device cannot be used here.
            InsufficientMemoryError: weights and a minimal KV cache would not fit.
        """
        ...

    def submit(self, plan: StepPlan) -> int:
        """Start a step; returns a ticket for `collect`. One step in flight unless stated."""
        ...

    def collect(self, ticket: int) -> StepOutput:
        """Wait for a step.

        Raises:
            BackendError: the device failed; sequence state up to the step is still good.
        """
        ...

    def close(self) -> None:
        """Give everything back. Calling it again does nothing."""
        ...
