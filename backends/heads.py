"""Medusa heads on the CPU: one small graph, run for the states that texts go on from.

With one thread: threads that wait for the next step of the model would be in the way of others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backends.cpu_avx512.threads import choose_kernels
from headrace.backends.ort_session import cpu_session, map_ort_errors
from headrace.runtime.errors import BackendError
from headrace.runtime.machine.hardware import HardwareInfo
from headrace.runtime.manifest import (
    HEAD_PROBABILITIES,
    HEAD_TOKENS,
    HIDDEN,
    NUM_CANDIDATES,
    TargetInfo,
    package_path,
)

Float = NDArray[np.float32]
_WARM_UP_RUNS = 2  # the first ones take longer, and would give a wrong idea of the cost


class CpuHeads:
    """The heads of a package's target. See `runtime.draft_heads.HeadsRunner`.

    Raises:
        PackageError: they cannot be read.
    """

    def __init__(
        self, folder: Path, target: TargetInfo, hidden_size: int, hardware: HardwareInfo
    ) -> None:
        assert target.heads is not None
        kernels = choose_kernels(hardware, {tensor.format for tensor in target.tensors})
        graph = package_path(folder, target.heads.file)
        self._session: Any = cpu_session(graph, 1, kernels.session_options)
        for _ in range(_WARM_UP_RUNS):
            self.candidates(np.zeros((1, hidden_size), np.float32), 1)

    def run(self, states: Sequence[Float]) -> tuple[list[list[tuple[int, float]]], float]:
        """The likeliest token of each head."""
        start = time.perf_counter()
        tokens, probabilities = self.candidates(np.stack(states), 1)
        pairs = zip(tokens[:, :, 0].T.tolist(), probabilities[:, :, 0].T.tolist(), strict=True)
        chains = [list(zip(*pair, strict=True)) for pair in pairs]
        return chains, (time.perf_counter() - start) * 1e3

    def candidates(self, states: Float, count: int) -> tuple[NDArray[np.int64], Float]:
        """The `count` likeliest tokens of each head and their probabilities, [heads, n, count].

        Args:
            states: float32 [n, hidden].
        """
        if self._session is None:
            raise BackendError("the heads were closed")
        feeds = {HIDDEN: states, NUM_CANDIDATES: np.array([count], np.int64)}
        with map_ort_errors("running heads"):
            found = self._session.run([HEAD_TOKENS, HEAD_PROBABILITIES], feeds)
        return found[0], found[1]

    def close(self) -> None:
        """Give their memory back. Calling it again does nothing."""
        self._session = None
