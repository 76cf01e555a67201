"""`--qat` on a tiny random model: it helps, stores what it trained, and can be interrupted."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from headrace.exporters import calibrate, qat
from headrace.exporters.package import export_package
from headrace.exporters.quant.formats import Blocks, RowInt8
from headrace.runtime.errors import ExportError

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch

WORDS = ("the", "river", "in", "a", "north", "they", "went", "on", "there", "and", "no", "winter")


def some_text(num_words: int = 2000) -> str:
    rng = np.random.default_rng(0)
    return " ".join(rng.choice(WORDS, num_words))


@pytest.fixture(autouse=True)
def _little_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_NUM_CHUNKS", 4)
    monkeypatch.setattr(calibrate, "_CHUNK_TOKENS", 128)


@pytest.fixture(autouse=True)
def _fast_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model has no large activations that a coarse step would break."""
    monkeypatch.setattr(qat, "Recipe", partial(qat.Recipe, learning_rate=0.02))


@pytest.fixture
def export(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """`export(name, steps, **options)` writes a package of that name."""

    def run(name: str, steps: int = 0, **options: Any) -> Path:
        text = {"qat_text": some_text(), "qat_steps": steps} if steps else {}
        given = {"precision": "int4", "kv_cache": "fp32", "forms": ["uniform"]} | text | options
        export_package(tiny_checkpoint(), tmp_path / name, **given)
        return tmp_path / name

    return run


def initializers(package: Path) -> dict[str, np.ndarray]:
    model = ir.load(next(package.glob("*/uniform.onnx")))
    return {
        name: value.const_value.numpy().copy()
        for name, value in model.graph.initializers.items()
        if value.const_value is not None
    }


def held_out_losses(folder: Path) -> list[float]:
    lines = (folder / "loss.csv").read_text("utf-8").splitlines()[1:]
    return [float(last) for line in lines if (last := line.split(",")[2])]


def test_training_brings_the_package_closer(export: Callable[..., Path], tmp_path: Path) -> None:
    before, after = (
        json.loads((package / "precision_report.json").read_text("utf-8"))
        for package in (export("plain"), export("trained", 60))
    )
    assert after["weight_bytes"] == before["weight_bytes"]
    assert [t["format"] for t in after["tensors"]] == [t["format"] for t in before["tensors"]]
    losses = held_out_losses(tmp_path / "trained.qat")
    assert losses[-1] < 0.85 * losses[0]
    assert sorted(file.name for file in (tmp_path / "trained.qat").iterdir()) == [
        "loss.csv",
        "loss.svg",
    ]


def test_what_is_stored_is_what_was_trained(
    export: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.exporters.train import run

    decoders: list[Any] = []
    fold = run.folded

    def keep(decoder: Any) -> Any:
        decoders.append(decoder)
        return fold(decoder)

    monkeypatch.setattr(run, "folded", keep)
    stored = initializers(export("trained", 12))
    kinds = set()
    for name, linear in decoders[0].linears.items():
        if f"{name}.blocks" in stored:
            blocks, scales, zeros = (
                stored[f"{name}.{part}"] for part in ("blocks", "scales", "zero_points")
            )
            found = Blocks(4, 2 * blocks.shape[2], blocks, scales, zeros).dequantize()
        else:
            parts = [name] if f"{name}.scales" in stored else name.split("+")
            codes, scales = (
                np.concatenate([stored[f"{part}.{kind}"] for part in parts], axis=-1)
                for kind in ("codes_t", "scales")
            )
            found = RowInt8(codes.T, scales).dequantize()
        kinds.add(f"{name}.blocks" in stored)
        np.testing.assert_array_equal(found, linear.rounded().detach().numpy())
    assert kinds == {True, False}
    for name, vector in decoders[0].vectors.items():
        np.testing.assert_array_equal(stored[name], vector.detach().numpy())


def interrupt_at(step: int) -> Callable[[str, int, int], None]:
    def progress(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("training", step):
            raise KeyboardInterrupt

    return progress


def test_interrupted_it_goes_on_to_the_same_package(
    export: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.exporters.train import adam, loop

    undisturbed = initializers(export("undisturbed", 25))
    state = tmp_path / "interrupted.qat" / "state.json"

    def steps_done() -> int:
        assert not (tmp_path / "interrupted").exists()
        return int(json.loads(state.read_text("utf-8"))["step"])

    with pytest.raises(KeyboardInterrupt):
        export("interrupted", 25, progress=interrupt_at(4))
    assert steps_done() == 4
    move, moves = adam.Adam._move, []

    def die_half_way(self: Any, name: str, number: int, rate: float) -> None:
        moves.append(name)
        if number == 13 and len(set(moves)) < len(moves):
            raise KeyboardInterrupt
        move(self, name, number, rate)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(adam.Adam, "_move", die_half_way)
        export("interrupted", 25)
    assert steps_done() == 10  # the last state that was kept; half a step is none
    losses_of = loop.Trainer._losses

    def die_judging(self: Any, token_ids: Any) -> Any:
        if self._step == 20 and not torch.is_grad_enabled():
            raise KeyboardInterrupt
        return losses_of(self, token_ids)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop.Trainer, "_losses", die_judging)
        export("interrupted", 25)
    assert steps_done() == 20
    seen: list[int] = []

    def note(stage: str, done: int, total: int) -> None:
        if stage == "training":
            seen.append(done)

    resumed = initializers(export("interrupted", 25, progress=note))
    assert seen == list(range(20, 26))
    assert resumed.keys() == undisturbed.keys()
    for name, values in undisturbed.items():
        np.testing.assert_array_equal(resumed[name], values)
    losses = [
        (tmp_path / f"{n}.qat" / "loss.csv").read_text() for n in ("undisturbed", "interrupted")
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("precision", ["w8a8_row", "auto", "w8a8_block", "w4a8_block"])
def test_every_precision_that_can_be_trained(
    precision: str, export: Callable[..., Path], tmp_path: Path
) -> None:
    options = {"precision": precision, "quant_threshold": 0.9} if precision == "auto" else {}
    package = export("trained", 2, **{"precision": precision} | options)
    assert json.loads((package / "precision_report.json").read_text("utf-8"))["joint"]
    assert len(held_out_losses(tmp_path / "trained.qat")) == 2


def test_damaged_state_is_named(export: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        export("trained", 4, progress=interrupt_at(2))
    tensors = tmp_path / "trained.qat" / "state-2.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:1000])
    with pytest.raises(ExportError, match=r"state-2\.safetensors is damaged.*delete"):
        export("trained", 4)


def test_a_model_that_torch_computes_otherwise_is_refused(
    export: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.exporters.train import decoder

    monkeypatch.setattr(decoder, "_rotary", lambda x, cos, sin: x)
    with pytest.raises(ExportError, match="architecture llama cannot be trained"):
        export("trained", 4)
    assert list(tmp_path.iterdir()) == []
