"""What the largest step has taken goes back to the system when nothing is to be done."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace.backends.cpu_avx512.backend import CpuBackend
from headrace.runtime.config import EngineConfig
from headrace.runtime.core import Row, StepPlan
from headrace.runtime.machine.hardware import probe_hardware
from headrace.runtime.manifest import read_manifest

REST = StepPlan(0, ())
VOCAB = 16_384
BIG = 256  # logits of the largest step: 16 MiB, probabilities as much, and what makes them
# Prints the memory of a process that no file holds, in KiB: before a large step, behind it, and at
# rest again.
CHILD = """
import re, sys
from pathlib import Path
from test_rest import BIG, REST, loaded, rows_of

def own_kib():
    kinds = Path("/proc/self/smaps_rollup").read_text()
    return re.search(r"Anonymous: +([0-9]+) kB", kinds)[1]

backend = loaded(Path(sys.argv[1]))
def run(plan):
    backend.collect(backend.submit(plan))

run(rows_of(1))
run(REST)
print(own_kib())
run(rows_of(BIG))
print(own_kib())
run(REST)
print(own_kib())
"""

Maker = Callable[..., Path]


def loaded(folder: Path) -> CpuBackend:
    backend = CpuBackend(
        folder, read_manifest(folder), EngineConfig(max_sequences=2), probe_hardware()
    )
    backend.load()
    return backend


def rows_of(num_logits: int) -> StepPlan:
    """A step of one sequence that samples behind each of its tokens."""
    tokens = tuple(range(3, 3 + num_logits))
    return StepPlan(1, (Row(0, 0, 0, tokens, num_logits, 1.0),))


def test_nothing_holds_the_buffers_of_steps(tiny_package: Maker) -> None:
    backend = loaded(tiny_package("w8a8_row", "int8"))
    buffers, found = [], []
    for num_logits in (2, 100, 2):  # 100: more than the shared buffers have room for
        output = backend.collect(backend.submit(rows_of(num_logits)))
        assert output.probabilities is not None
        found.append((output.logits.copy(), output.probabilities.values.copy()))
        for array in (output.logits, output.probabilities.values):
            assert isinstance(array.base, np.ndarray)
            buffers.append(weakref.ref(array.base))
        del output, array
        if num_logits == 100:
            backend.collect(backend.submit(REST))
            gc.collect()
            assert [buffer() for buffer in buffers] == [None] * 4
    for before, after in zip(found[0], found[2], strict=True):
        np.testing.assert_array_equal(before, after)
    backend.close()


@pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc",
    reason="other systems' heaps give back when they like",
)
def test_a_large_step_leaves_no_memory_behind(tiny_package: Maker) -> None:
    folder = tiny_package("w8a8_row", forms=("ragged",), calibrate=False, vocab=VOCAB)
    command = [sys.executable, "-c", CHILD, str(folder)]
    done = subprocess.run(
        command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True, check=True
    )
    before, amid, after = map(int, done.stdout.split())
    grown = amid - before
    assert grown > 2 * BIG * VOCAB * 4 >> 10
    assert after - before < 0.1 * grown
