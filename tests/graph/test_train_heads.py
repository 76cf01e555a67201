"""`runtime-export train-heads` on a tiny random model: heads learn, and it can be interrupted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace.exporters import cli
from headrace.exporters.heads import collect as collecting
from headrace.exporters.heads.add import add_heads
from headrace.exporters.heads.checkpoint import read_heads
from headrace.runtime import Runtime

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch

WORDS = ("the", "river", "in", "a", "north", "they", "went", "on", "there", "and", "no", "winter")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.exporters.train import heads

    torch.set_num_threads(1)  # matrices are tiny
    monkeypatch.setattr(collecting, "MAX_NEW_TOKENS", 16)
    monkeypatch.setattr(collecting, "CHUNK_TOKENS", 64)
    monkeypatch.setattr(heads, "_WARM_UP_STEPS", 5)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """A text of few words, and two prompts."""
    rng = np.random.default_rng(0)
    (tmp_path / "text").write_text(" ".join(rng.choice(WORDS, 600)), encoding="utf-8")
    lines = [json.dumps({"turns": [prompt]}) for prompt in ("the river", "winter")]
    (tmp_path / "prompts").write_text("\n".join(lines), encoding="utf-8")
    return ["--prompts", str(tmp_path / "prompts"), "--text", str(tmp_path / "text")]


def train(checkpoint: Path, package: Path, output: Path, files: list[str], steps: int = 50) -> int:
    words = ["train-heads", str(checkpoint), str(package), "-o", str(output), *files, "-q"]
    return cli.main(
        [*words, "--answers", "2", "--heads", "2", "--tokens", "64", "--steps", f"{steps}"]
    )


def losses(folder: Path) -> list[float]:
    lines = (folder / "loss.csv").read_text("utf-8").splitlines()[1:]
    return [float(last) for line in lines if (last := line.split(",")[2])]


@pytest.mark.parametrize("precision", ["w8a8_row", "fp32"])
def test_heads_learn_and_find_their_place_in_the_package(
    tiny_checkpoint: Callable[..., Path],
    tiny_package: Callable[..., Path],
    tmp_path: Path,
    files: list[str],
    precision: str,
) -> None:
    package = tiny_package(precision, "int8")
    assert train(tiny_checkpoint(), package, tmp_path / "heads", files) == 0
    found = losses(tmp_path / "heads.train")
    assert min(found) < 0.9 * found[0]
    kept = json.loads((tmp_path / "heads" / "training.json").read_text("utf-8"))
    heads = read_heads(tmp_path / "heads", 64, 256)
    assert heads.token_map is not None and len(heads.token_map) == 64
    assert kept["held_out_loss"] == pytest.approx(min(found), abs=1e-5)
    # What the graph in the package guesses is what training has measured.
    changed = shutil.copytree(package, tmp_path / "package")
    add_heads(tiny_checkpoint(), changed, tmp_path / "heads")
    with Runtime.load(changed, max_sequences=1) as runtime:
        assert runtime.generate([3, 4, 5], max_new_tokens=5, ignore_eos=True).token_ids


def test_an_interrupted_training_gives_the_same_heads(
    tiny_checkpoint: Callable[..., Path],
    tiny_package: Callable[..., Path],
    tmp_path: Path,
    files: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from headrace.exporters.train import heads

    package = tiny_package("w8a8_row", "int8")
    judge_every = {"judge_every": 20}
    recipe = heads.HeadRecipe
    monkeypatch.setattr(heads, "HeadRecipe", lambda *args: recipe(*args, **judge_every))
    assert train(tiny_checkpoint(), package, tmp_path / "whole", files) == 0
    advance = heads._Trainer._advance

    def interrupt(trainer: heads._Trainer) -> None:
        if trainer._step == 30:
            raise KeyboardInterrupt
        advance(trainer)

    monkeypatch.setattr(heads._Trainer, "_advance", interrupt)
    assert train(tiny_checkpoint(), package, tmp_path / "parts", files) == 130
    assert not (tmp_path / "parts").exists()
    monkeypatch.setattr(heads._Trainer, "_advance", advance)
    assert train(tiny_checkpoint(), package, tmp_path / "parts", files) == 0
    name = "medusa_lm_head.safetensors"
    assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_the_state_of_another_training_is_refused(
    tiny_checkpoint: Callable[..., Path],
    tiny_package: Callable[..., Path],
    tmp_path: Path,
    files: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    package = tiny_package("w8a8_row", "int8")
    assert train(tiny_checkpoint(), package, tmp_path / "heads", files, steps=2) == 0
    assert train(tiny_checkpoint(), package, tmp_path / "heads", files, steps=3) == 2
    assert "it is of another" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["{", '{"turns": []}', '{"turns": [3]}', '{"prompt": "a"}'])
def test_prompts_that_are_none_are_refused(
    tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts").write_text('{"turns": ["a"]}\n' + line, encoding="utf-8")
    words = ["train-heads", "x", "y", "-o", "z", "--prompts", str(tmp_path / "prompts")]
    assert cli.main(words) == 2
    assert "prompts:2" in capsys.readouterr().err
