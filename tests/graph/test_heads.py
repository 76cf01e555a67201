"""The graph of Medusa heads against its slow twin, and what adding heads does to a package."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from heads import plain_states, probabilities_of, random_heads
from tiny import read_folder

from headrace.backends.heads import CpuHeads
from headrace.exporters import cli
from headrace.exporters.heads.add import add_heads
from headrace.exporters.heads.checkpoint import Heads, read_heads, write_heads
from headrace.exporters.validate import GraphRunner
from headrace.runtime import Runtime
from headrace.runtime.errors import CheckpointError
from headrace.runtime.machine.hardware import probe_hardware
from headrace.runtime.manifest import HIDDEN, LOGITS, read_manifest

TOKENS = [5, 9, 33, 77, 120, 4]
SOME_TOKENS = np.array([3, 5, 8, *range(40, 200, 3), 250])
KINDS: dict[str, dict[str, object]] = {
    "shared": {},
    "two_blocks": {"num_blocks": 2},
    "own_outputs": {"own_outputs": True},
    "some_tokens": {"token_map": SOME_TOKENS},
    "all_of_it": {"token_map": SOME_TOKENS, "own_outputs": True, "num_blocks": 2, "num_heads": 5},
}


def output_matrix(checkpoint: Path) -> np.ndarray:
    tensors, _ = read_folder(checkpoint)
    return tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("precision", ["fp32", "w8a8_row"])
def test_graph_is_its_twin(
    tiny_checkpoint: Callable[..., Path],
    tiny_package: Callable[..., Path],
    tmp_path: Path,
    precision: str,
    tied: bool,
    kind: str,
) -> None:
    """INT8 packages have the residual stream in another basis, which the heads have to meet."""
    checkpoint = tiny_checkpoint(tied=tied)
    package = shutil.copytree(
        tiny_package(precision, calibrate=False, tied=tied), tmp_path / "package"
    )
    write_heads(tmp_path / "heads", random_heads(**KINDS[kind]))
    heads = read_heads(tmp_path / "heads", 64, 256)
    manifest = add_heads(checkpoint, package, tmp_path / "heads")
    target, output = manifest.targets[0], output_matrix(checkpoint)
    given = GraphRunner(next(package.glob("*/ragged.onnx")), 16).append(TOKENS)
    found = CpuHeads(package, target, 64, probe_hardware()).candidates(given[HIDDEN], 4)
    plain = plain_states(checkpoint, package, given[HIDDEN])
    exact = precision == "fp32"
    np.testing.assert_allclose(plain @ output.T, given[LOGITS], atol=1e-4 if exact else 0.3)
    expected = probabilities_of(heads, plain, output)
    tolerance = 1e-5 if exact else 0.1
    for head, (tokens, probabilities) in enumerate(zip(*found, strict=True)):
        np.testing.assert_allclose(
            probabilities, np.take_along_axis(expected[head], tokens, 1), atol=tolerance
        )
        best = np.sort(expected[head], axis=1)[:, :-5:-1]
        np.testing.assert_allclose(probabilities, best, atol=tolerance)


def test_heads_are_replaced_and_removed_files_are_not_listed(
    tiny_checkpoint: Callable[..., Path], tiny_package: Callable[..., Path], tmp_path: Path
) -> None:
    package = shutil.copytree(tiny_package("fp32", calibrate=False), tmp_path / "package")
    before = read_manifest(package)
    for seed in (0, 1):
        write_heads(tmp_path / f"{seed}", random_heads(seed=seed))
        assert (
            cli.main(["add-heads", str(tiny_checkpoint()), str(package), f"{tmp_path / f'{seed}'}"])
            == 0
        )
    after = read_manifest(package, verify_hashes=True)
    heads = after.targets[0].heads
    assert heads is not None and (heads.num_heads, heads.vocab_size) == (3, 256)
    assert len(after.files) == len(before.files) + 2
    listed = {info.path for info in after.files} | {"manifest.json"}
    assert listed == {p.relative_to(package).as_posix() for p in package.rglob("*") if p.is_file()}
    with Runtime.load(package, max_sequences=1) as runtime:
        assert len(runtime.generate([3, 4, 5], max_new_tokens=5, ignore_eos=True).token_ids) == 5


def test_a_package_of_another_checkpoint_is_refused(
    tiny_checkpoint: Callable[..., Path],
    tiny_package: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    package = tiny_package("fp32", calibrate=False)
    before = (package / "manifest.json").read_bytes()
    write_heads(tmp_path, random_heads())
    assert cli.main(["add-heads", str(tiny_checkpoint(seed=5)), str(package), str(tmp_path)]) == 1
    assert "is not what" in capsys.readouterr().err
    assert (package / "manifest.json").read_bytes() == before


def written(folder: Path, heads: Heads, **changes: object) -> Path:
    write_heads(folder, heads)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({}, {"medusa_num_heads": 4}, r"lacks tensor '3\.0\.linear\.weight'"),
        ({}, {"medusa_num_heads": 2}, r"holds tensor '2\.0\.linear\.bias'"),
        ({}, {"medusa_num_heads": True}, "medusa_num_heads=True"),
        ({}, {"medusa_num_layers": "1"}, "medusa_num_layers='1'"),
        ({}, {"medusa_num_layers": 0}, "medusa_num_layers=0"),
        ({"hidden": 32}, {}, "heads of another model"),
        ({"vocab": 300, "own_outputs": True}, {}, "heads of another model"),
        ({"token_map": np.array([4, 256])}, {}, "heads of another model"),
        ({"token_map": np.array([4, 4])}, {}, "no rising list"),
    ],
)
def test_malformed_heads_are_refused(
    tmp_path: Path, options: dict[str, object], changes: dict[str, object], message: str
) -> None:
    folder = written(tmp_path / "heads", random_heads(**options), **changes)
    with pytest.raises(CheckpointError, match=message):
        read_heads(folder, 64, 256)


def test_missing_and_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "heads", random_heads())
    file = folder / "medusa_lm_head.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        read_heads(folder, 64, 256)
    file.rename(file.with_suffix(".pt"))
    with pytest.raises(CheckpointError, match="pickle"):
        read_heads(folder, 64, 256)
    file.with_suffix(".pt").unlink()
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        read_heads(folder, 64, 256)
