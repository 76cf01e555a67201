"""Models that share threads answer as with their own, and have no more of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.runtime.machine.hardware import probe_hardware

CHILD = """
import json, sys
import psutil
from headrace.runtime import Runtime
from headrace.runtime.factory import share_threads

folder, how = sys.argv[1:]
if how == "shared":
    share_threads(2)
with Runtime.load(folder, num_threads=2) as first:
    before = psutil.Process().num_threads()
    with Runtime.load(folder, num_threads=2) as second:
        added = psutil.Process().num_threads() - before
        requests = [model.submit([5, 6, 7], max_new_tokens=12) for model in (first, second)]
        tokens = [request.result().token_ids for request in requests]
print(json.dumps({"added": added, "tokens": tokens}))
"""


def run(folder: Path, how: str) -> dict[str, Any]:
    command = [sys.executable, "-c", CHILD, str(folder), how]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""  # ONNX Runtime would warn of threads that are asked for beside these
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(probe_hardware().usable_cores < 2, reason="one core has nothing to share")
def test_shared_threads(tiny_package: Callable[..., Path]) -> None:
    folder = tiny_package("w8a8_row", "int8", forms=("ragged",))
    shared, own = run(folder, "shared"), run(folder, "own")
    assert shared["tokens"] == own["tokens"]
    assert shared["tokens"][0] == shared["tokens"][1]
    assert shared["added"] < own["added"]
