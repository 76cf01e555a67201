"""What the INT8 cache is calibrated and judged on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace.exporters.package import export_package
from headrace.exporters.validate import GraphRunner


def test_no_chunk_is_both_calibrated_on_and_held_out(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales see some chunks, the gate others, and progress counts each once."""
    fed: dict[str, set[tuple[int, ...]]] = {}

    def run(self: GraphRunner, token_ids: list[int], *, last_only: bool = False) -> np.ndarray:
        fed.setdefault("seen" if last_only else "held out", set()).add(tuple(token_ids))
        return original(self, token_ids, last_only=last_only)

    original = GraphRunner.run
    monkeypatch.setattr(GraphRunner, "run", run)
    progress: list[tuple[int, int]] = []
    result = export_package(
        tiny_checkpoint(),
        tmp_path / "package",
        kv_cache="int8",
        progress=lambda stage, done, total: (
            progress.append((done, total)) if "KV" in stage else None
        ),
    )
    assert result.kv_fidelity is not None and result.kv_fidelity.num_tokens > 500
    fed["held out"].discard((0,))  # the smoke test of the finished graph
    assert len(fed["seen"]) > 2 * len(fed["held out"]) > 0
    assert not fed["seen"] & fed["held out"]
    assert progress[0][0] == 0 and progress[-1][0] == progress[-1][1]
