"""Every architecture as the exporter's default makes it: INT8 weights, activations and cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from architectures import CONFIGS, write_model
from backend_driver import Schedule, ragged_schedule, run_schedule

from headrace.exporters import calibrate
from headrace.exporters.package import export_package
from headrace.runtime.fidelity import log_softmax, mean_kl_nats

LENGTHS = (1, 30, 22, 40)
MAX_KL_NATS = 0.1


@pytest.fixture(scope="module", params=CONFIGS)
def packages(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Path]]:
    """INT8 and FP32."""
    folder = tmp_path_factory.mktemp("arch")
    source = write_model(request.param, folder / "hf")
    with pytest.MonkeyPatch.context() as patch:  # scales of tiny models need little text
        patch.setattr(calibrate, "_NUM_CHUNKS", 4)
        patch.setattr(calibrate, "_CHUNK_TOKENS", 128)
        export_package(source, folder / "int8", kv_cache="int8")
    export_package(source, folder / "fp32", precision="fp32", kv_cache="fp32")
    yield folder / "int8", folder / "fp32"


def sequences() -> list[list[int]]:
    rng = np.random.default_rng(4)
    return [rng.integers(3, 253, length).tolist() for length in LENGTHS]


def test_int8_is_near_fp32(packages: tuple[Path, Path]) -> None:
    whole: Schedule = [[(i, 0, n) for i, n in enumerate(LENGTHS)]]
    int8, fp32 = (run_schedule(package, sequences(), whole)[0] for package in packages)
    actual, expected = (log_softmax(np.concatenate(logits)) for logits in (int8, fp32))
    assert 0 < mean_kl_nats(expected, actual) < MAX_KL_NATS


@pytest.mark.parametrize("form", ["ragged", "uniform"])
def test_batch_is_single_and_chunked_is_whole(packages: tuple[Path, Path], form: str) -> None:
    """The same bits from ragged steps of all sequences as from each sequence alone and at once."""
    steps = ragged_schedule(LENGTHS, np.random.default_rng(5))
    together, _ = run_schedule(packages[0], sequences(), steps, form=form)
    for tokens, logits in zip(sequences(), together, strict=True):
        alone, _ = run_schedule(packages[0], [tokens], [[(0, 0, len(tokens))]], form=form)
        np.testing.assert_array_equal(logits, alone[0])
