"""`tools/gpu_check.py` without a card: that it says so, and what it does with one that is not."""

from __future__ import annotations

import time
from pathlib import Path

import gpu_check
import numpy as np
import pytest
from fake_cuda import HostDevice, NumpySession

from headrace.backends.base import Backend
from headrace.backends.cuda import provider
from headrace.backends.cuda.backend import Connection, CudaBackend
from headrace.runtime.config import EngineConfig
from headrace.runtime.machine.hardware import probe_hardware
from headrace.runtime.manifest import read_manifest

TINY = {"layers": 1, "hidden": 64, "heads": 4, "kv_heads": 2, "vocab": 256}


def opened(package: Path, config: EngineConfig) -> Backend:
    return CudaBackend(
        package,
        read_manifest(package),
        config,
        probe_hardware(),
        connect=lambda graph: Connection(NumpySession(graph), HostDevice(1 << 26)),
    )


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "SMALL", TINY)
    monkeypatch.setattr(gpu_check, "LENGTHS", (1, 12, 20))
    monkeypatch.setattr(gpu_check, "GREEDY_TOKENS", 3)
    monkeypatch.setattr(gpu_check, "REPEATS", 2)


def test_no_card_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(provider, "obstacle", lambda: "no card")
    assert gpu_check.main([]) == 1
    assert capsys.readouterr().out == "gpu_check: nothing was checked: no card\n"


def test_every_target_is_compared_and_timed(capsys: pytest.CaptureFixture[str]) -> None:
    code = gpu_check.check(None, [1, 3], 9, time.monotonic() + 600, opened, HostDevice(), TINY)
    lines = capsys.readouterr().out.splitlines()
    assert code == 0 and lines[-1] == "gpu_check: passed: every target agrees"
    compared = [line for line in lines if line.endswith("  ok")]
    assert [line.split()[0] for line in compared] == ["cuda_fp16", "cuda_w8", "cuda_w4"]
    assert [line.split()[:2] for line in lines[-7:-1]] == [
        [target, rows] for target in ("cuda_fp16", "cuda_w8", "cuda_w4") for rows in ("1", "3")
    ]


def test_a_wrong_target_fails_and_time_runs_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(package: Path, config: EngineConfig) -> Backend:
        backend = opened(package, config)
        if config.target == "cuda_w8":
            run = backend._run

            def spoiled(*args: object) -> tuple[object, ...]:
                logits, *rest = run(*args)
                return np.roll(logits, 1, axis=-1), *rest

            backend._run = spoiled
        return backend

    code = gpu_check.check(None, [1], 9, time.monotonic() - 1, wrong, HostDevice(), TINY)
    lines = capsys.readouterr().out.splitlines()
    assert code == 1 and lines[-1] == "gpu_check: FAILED: cuda_w8"
    assert lines[-2] == "no time was left for cuda_fp16, cuda_w8, cuda_w4"


def test_chunks_cover_every_token_once() -> None:
    lengths = (1, 12, 40)
    sent = [[0] * n for n in lengths]
    for step in gpu_check.chunked(lengths):
        for i, past, stop in step:
            assert all(sent[i][:past]) and not any(sent[i][past:])
            sent[i][past:stop] = [1] * (stop - past)
    assert all(all(text) for text in sent)
