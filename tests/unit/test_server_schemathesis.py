"""Schemathesis against the served description: what it may send is answered as described.

This is its shortest run. A longer one, against a server that runs:
    schemathesis run http://127.0.0.1:8000/openapi.json --exclude-checks positive_data_acceptance
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from server_samples import Serving, package_model, serving
from tiny_bert import write_tiny_bert

from headrace.exporters.encoder_package import export_encoder
from headrace.runtime import Embedder
from headrace.runtime.server.residents import Served

# A body too large is refused before it is read, so what else is wrong with it stays unsaid.
CONFIG = """
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 406, 409, 413, 415, 422, 428, 429]
"""

pytestmark = pytest.mark.skipif(
    find_spec("schemathesis") is None, reason="schemathesis is not installed"
)


@pytest.fixture(scope="module")
def server(
    tiny_package: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("encoder")
    source = write_tiny_bert(folder / "source", max_seq_length=24)
    export_encoder(source, folder / "package", precision="fp32")
    served = {
        "tiny": package_model(tiny_package("fp32")),
        "minilm": Served(lambda: Embedder.load(folder / "package", num_threads=1), Embedder),
    }
    with serving(served, max_tokens=2, max_body_bytes=100_000) as running:
        yield running


@pytest.mark.slow
def test_schemathesis(server: Serving, tmp_path: Path) -> None:
    config = tmp_path / "schemathesis.toml"
    config.write_text(CONFIG, encoding="utf-8")
    program = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config)]
    options = [
        "--max-examples",
        "10",
        "--no-color",
        "--mode",
        "all",
        "--phases",
        "coverage,fuzzing",
    ]
    # A schema cannot say all that makes a request wrong; what it can, test_server_description.py
    # holds the server to.
    options += ["--exclude-checks", "positive_data_acceptance", "--generation-database", "none"]
    done = subprocess.run(
        [*program, "run", f"{server.url}/openapi.json", *options],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
