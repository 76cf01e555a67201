"""Sums and gathers by torch.distributed instead of the parent; what ranks on cards would use NCCL
for. It opens sockets on the loopback device."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.runtime.errors import BackendUnavailableError

_TIMEOUT_S = 60


class GlooCollective:
    """See `chain.Collective`.

    Args:
        meeting: a file that does not exist yet, where ranks find each other.

    Raises:
        BackendUnavailableError: torch is not installed.
    """

    def __init__(self, meeting: Path, rank: int, ranks: int) -> None:
        try:
            import torch
            from torch import distributed
        except ImportError:
            raise BackendUnavailableError(
                'sums by gloo need torch; pip install "headrace[tensor-parallel]"'
            ) from None
        self._torch, self._distributed, self._ranks = torch, distributed, ranks
        distributed.init_process_group(
            "gloo",
            store=distributed.FileStore(str(meeting), ranks),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=_TIMEOUT_S),
        )

    def all_reduce(self, values: NDArray[Any]) -> None:
        self._distributed.all_reduce(self._torch.from_numpy(values))

    def all_gather(self, values: NDArray[Any]) -> NDArray[Any]:
        given = np.empty((self._ranks, *values.shape), values.dtype)
        parts = list(self._torch.from_numpy(given))
        self._distributed.all_gather(parts, self._torch.from_numpy(values))
        return given

    def close(self) -> None:
        self._distributed.destroy_process_group()
