"""Bytes of KV a token: what the package says, and what the system has committed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace.backends.cpu_avx512.backend import CpuBackend
from headrace.runtime.config import EngineConfig
from headrace.runtime.core import Row, StepPlan
from headrace.runtime.machine.hardware import probe_hardware
from headrace.runtime.manifest import read_manifest

TOKENS = 1024


def resident_bytes(address: int) -> int:
    """Of the mapping at this address (Linux)."""
    found = False
    for line in Path("/proc/self/smaps").read_text("utf-8").splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(span[1], 16) <= address < int(span[2], 16)
        elif found and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no such mapping")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
@pytest.mark.parametrize(("kv_cache", "value_bits"), [("fp32", 32), ("int8", 8), ("int4", 4)])
def test_memory_is_what_the_package_says(
    kv_cache: str, value_bits: int, tiny_package: Callable[..., Path]
) -> None:
    folder = tiny_package(
        "w8a8_row",
        kv_cache,
        ("ragged",),
        calibrate=kv_cache != "fp32",
        hidden=256,
        context=TOKENS,
    )
    manifest = read_manifest(folder)
    backend = CpuBackend(folder, manifest, EngineConfig(max_sequences=2), probe_hardware())
    caps = backend.load()
    assert caps.kv_bytes_per_token == 2 * 2 * 2 * 64 * value_bits // 8
    assert caps.exact_rows == (kv_cache != "fp32")
    tokens = np.random.default_rng(0).integers(3, 256, TOKENS).tolist()
    for start in range(0, TOKENS, 128):
        row = Row(0, 1, start, tuple(tokens[start : start + 128]), 0)
        backend.collect(backend.submit(StepPlan(0, (row,))))
    measured = resident_bytes(backend._kv._cache.ctypes.data)
    backend.close()
    assert measured == pytest.approx(TOKENS * caps.kv_bytes_per_token, rel=0.02)
