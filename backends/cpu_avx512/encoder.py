"""Text encoders on the CPU: packed calls of one graph."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backends.cpu_avx512.threads import choose_kernels, choose_threads
from headrace.backends.ort_session import cpu_session, map_ort_errors
from headrace.runtime import encoder_manifest as io
from headrace.runtime.encoder_manifest import EncoderManifest
from headrace.runtime.errors import BackendError, InsufficientMemoryError, PackageError
from headrace.runtime.hardware import HardwareInfo
from headrace.runtime.manifest import package_path

logger = logging.getLogger(__name__)

Float = NDArray[np.float32]
TokenIds = Sequence[Sequence[int]]


class CpuEncoder:
    """A loaded encoder. Thread-safe.

    Attributes:
        name: of the kernels and threads, for messages.

    Raises:
        ConfigError: `num_threads` is more than this process may use.
        PackageError: the package has no graph for the CPU, or it cannot be read.
        InsufficientMemoryError: the weights would not fit.
    """

    def __init__(
        self,
        folder: Path,
        manifest: EncoderManifest,
        num_threads: int | None,
        hardware: HardwareInfo,
    ) -> None:
        target = next((t for t in manifest.targets if t.device == "cpu"), None)
        if target is None:
            raise PackageError(f"{folder} has no CPU target; export it for the CPU")
        threads = choose_threads(hardware, num_threads)
        kernels = choose_kernels(hardware)
        if kernels.warning and target.precision != "fp32":
            logger.warning(kernels.warning)
        needed, free = target.weight_bytes, hardware.available_memory_bytes
        if needed > free:
            raise InsufficientMemoryError(needed, free, "close other programs or export smaller")
        graph = package_path(folder, target.file)
        self._session: Any = cpu_session(graph, threads.num_threads, kernels.session_options)
        self._inputs = frozenset(value.name for value in self._session.get_inputs())
        self.name = f"cpu ({kernels.name}, {threads.num_threads} threads)"

    def run(self, calls: Sequence[TokenIds]) -> Iterator[Float]:
        """See `runtime.embedder.Encoder`."""
        return map(self._run_call, calls)

    def _run_call(self, texts: TokenIds) -> Float:
        session = self._session
        if session is None:
            raise BackendError("the encoder was closed")
        feeds = {name: array for name, array in pack(texts).items() if name in self._inputs}
        with map_ort_errors("encoding texts"):
            states: Float = session.run([io.STATES], feeds)[0]
        return states

    def close(self) -> None:
        """Give the memory back. Calling it again does nothing."""
        self._session = None


def pack(texts: TokenIds) -> dict[str, NDArray[np.int64]]:
    """Graph inputs of one call (see `encoder_manifest`)."""
    lengths = np.array([len(ids) for ids in texts], np.int64)
    starts = np.cumsum(lengths) - lengths
    longest = int(lengths.max())
    place = np.arange(longest)
    inside = place < lengths[:, None]
    return {
        io.INPUT_IDS: np.concatenate([np.asarray(ids, np.int64) for ids in texts]),
        io.POSITION_IDS: np.broadcast_to(place, inside.shape)[inside],
        io.GATHER_INDEX: np.where(inside, starts[:, None] + place, 0),
        io.SCATTER_INDEX: np.flatnonzero(inside),
        io.LENGTHS: lengths,
        io.FIRST_TOKENS: starts,
    }
