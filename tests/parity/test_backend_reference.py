"""The CPU backend, float32, against the float64 reference: prefill, decode and ragged batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference_llama
import tiny
from backend_driver import Schedule, ragged_schedule, relative_error, run_schedule

from headrace.exporters.package import export_package

LENGTHS = (1, 30, 22, 9)
TOLERANCE = 1e-4  # float32 sums in another order give about 3e-6

CASES: dict[str, dict[str, Any]] = {
    "grouped_tied": {},
    "multi_head_untied_biases": {"kv_heads": 4, "tied": False, "bias": True},
    "sharded_bfloat16": {"shards": 3, "dtype": "bfloat16", "layers": 3},
}
SCHEDULES: dict[str, Schedule] = {
    "prefill": [[(i, 0, n) for i, n in enumerate(LENGTHS)]],
    "decode": [
        [(i, t, t + 1) for i, n in enumerate(LENGTHS) if t < n] for t in range(max(LENGTHS))
    ],
    "ragged": ragged_schedule(LENGTHS, np.random.default_rng(2)),
}


@pytest.fixture(scope="module", params=CASES)
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Path]]:
    """A checkpoint folder and its package."""
    folder = tmp_path_factory.mktemp("tiny")
    source = tiny.write_tiny_llama(folder / "hf", seed=3, **CASES[request.param])
    export_package(source, folder / "package", precision="fp32", kv_cache="fp32")
    yield source, folder / "package"


@pytest.mark.parametrize("form", ["ragged", "uniform"])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_logits(exported: tuple[Path, Path], kind: str, form: str) -> None:
    source, package = exported
    tensors, config = tiny.read_folder(source)
    rng = np.random.default_rng(1)
    sequences = [rng.integers(3, 256, length).tolist() for length in LENGTHS]
    logits, entropy = run_schedule(package, sequences, SCHEDULES[kind], form=form)
    for i, tokens in enumerate(sequences):
        expected = reference_llama.forward(tensors, config, tokens)
        assert relative_error(logits[i], expected) < TOLERANCE, i
        nats = reference_llama.entropy_nats(expected)
        np.testing.assert_allclose(entropy[i], nats, atol=1e-3, err_msg=str(i))
