"""Bad input gets one clear line, and nothing is half-written or lost.

Here the whole commands run, on tiny checkpoints and packages; the readers, the configuration and
the sandbox have tests of their own for each malformed value.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_samples import write_gguf
from gguf import GGMLQuantizationType
from reference_llama import inverse_frequencies as reference_frequencies
from safetensors.numpy import load_file, save_file

from headrace.exporters import atomic_folder, package, weight_source
from headrace.exporters import cli as export_cli
from headrace.exporters.archs.llama import spec_from_config
from headrace.exporters.checkpoint.source import open_checkpoint
from headrace.exporters.checkpoint.values import LazyTensor, QuantBlocks
from headrace.exporters.graph.rope import inverse_frequencies
from headrace.runtime.errors import CheckpointError, ConfigError, ExportError

Capture = pytest.CaptureFixture[str]
FAST = ["--precision", "w8a8_row", "--kv-cache", "fp32"]
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def source(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> Path:
    """A tiny checkpoint that the test may damage."""
    return Path(shutil.copytree(tiny_checkpoint(layers=1), tmp_path / "source"))


@pytest.fixture
def exported(tmp_path: Path, tiny_package: Callable[..., Path]) -> Path:
    """A tiny package that the test may damage."""
    return Path(shutil.copytree(tiny_package("fp32"), tmp_path / "package"))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Where a package is to be made; its folder does not exist yet."""
    return tmp_path / "out" / "tiny"


def contents(folder: Path) -> dict[str, bytes]:
    """Every file in it, hidden ones included."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def refused(capsys: Capture, source: Path, output: Path, *options: str, code: int = 1) -> str:
    """Export; it must fail in one line. The line."""
    assert export_cli.main([str(source), "-o", str(output), *FAST, *options]) == code
    printed = capsys.readouterr()
    *progress, line = printed.err.splitlines()
    assert printed.out == ""
    assert not any("Traceback" in text for text in progress)
    assert line.startswith("runtime-export: ")
    return line


def refused_at_once(capsys: Capture, source: Path, output: Path, *options: str) -> str:
    """The same, before work starts: nothing else is printed and no folder appears."""
    before = contents(source) if source.is_dir() else {}
    assert export_cli.main([str(source), "-o", str(output), *FAST, *options]) == 1
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert not output.parent.exists()
    assert not source.is_dir() or contents(source) == before
    return printed.err


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), encoding="utf-8")


def edit_tensors(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tensors = dict(load_file(folder / "model.safetensors"))
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("content", "name", "expected"),
    [
        (b"", "model.gguf", "is empty"),
        (b"Dear diary, today I met a llama.", "model.gguf", "not a checkpoint"),
        (b"GGUF\x03\0\0\0", "model.gguf", "model.gguf"),
        (b"\x80\x02}q\0.", "weights", "pickle"),
        (b"PK\x03\x04" + b"\0" * 30, "model.pt", "pickle"),
        (b"anything", "pytorch_model.bin", "pickle"),
    ],
)
def test_files_that_are_no_checkpoint(
    tmp_path: Path, output: Path, capsys: Capture, content: bytes, name: str, expected: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    assert expected in refused_at_once(capsys, file, output)


def test_folders_that_are_no_checkpoint(source: Path, output: Path, capsys: Capture) -> None:
    assert "does not exist" in refused_at_once(capsys, source / "nothing", output)
    config = (source / "config.json").read_bytes()
    (source / "config.json").unlink()
    assert "config.json is missing" in refused_at_once(capsys, source, output)
    (source / "config.json").write_bytes(config)
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    assert "pickle" in refused_at_once(capsys, source, output)
    (source / "pytorch_model.bin").unlink()
    assert "no *.safetensors" in refused_at_once(capsys, source, output)


def test_truncated_weights(source: Path, tmp_path: Path, output: Path, capsys: Capture) -> None:
    gguf = write_gguf(tmp_path / "model.gguf")
    for file in (gguf, source / "model.safetensors"):
        whole = file.read_bytes()
        for length in (9, 100, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:length])
            place = source if file.parent == source else file
            assert file.name in refused_at_once(capsys, place, output)


def test_unknown_architecture(source: Path, tmp_path: Path, output: Path, capsys: Capture) -> None:
    edit_json(source / "config.json", model_type="mamba9")
    gguf = write_gguf(tmp_path / "model.gguf", architecture="mamba9")
    for place in (source, gguf):
        line = refused_at_once(capsys, place, output)
        assert "'mamba9'" in line
        assert "known ones: " in line and "llama" in line


def test_missing_tokenizer(source: Path, tmp_path: Path, output: Path, capsys: Capture) -> None:
    (source / "tokenizer.json").unlink()
    assert "no tokenizer.json" in refused_at_once(capsys, source, output)
    gguf = write_gguf(tmp_path / "model.gguf", tokenizer__ggml__tokens=None)
    assert "tokenizer.ggml.tokens" in refused_at_once(capsys, gguf, output)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_hidden_layers": 2}, "no tensor 'model.layers.1."),
        ({"hidden_size": 128}, "'model.embed_tokens.weight' has shape [256, 64]"),
        ({"num_attention_heads": 8}, "q_proj.weight' has shape [64, 64]"),
        ({"num_key_value_heads": 3}, "cannot share"),
        ({"intermediate_size": 64}, "gate_proj.weight' has shape [128, 64]"),
        ({"head_dim": 15}, "head_dim=15"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers"),
        ({"parallel_attn": True}, "parallel_attn=True is not known for 'llama'"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping=30.0"),
        ({"sliding_window": 16}, "sliding_window=16"),
        ({"max_position_embeddings": 2**31 - 1}, "max_position_embeddings"),
        ({"attention_bias": True}, "q_proj.bias"),
        ({"eos_token_id": 10**9}, "token 1000000000"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "'spiral' is not supported"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "factor=nan"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 1}}, "beta=1 is not"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0}}, "factor=0"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8}}, "long_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("inf")}}, "factor=inf"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 10**400}}, "not a positive number"),
        ({"rope_scaling": {"rope_type": "frequency_factors", "factors": [1.0]}}, "8 numbers"),
        (
            {"rope_scaling": {"rope_type": "frequency_factors", "factors": [1.0] * 7 + [0.0]}},
            "factors holds 0.0",
        ),
    ],
)
def test_configurations_that_do_not_fit(
    source: Path, output: Path, capsys: Capture, changes: dict[str, object], expected: str
) -> None:
    edit_json(source / "config.json", **changes)
    assert expected in refused_at_once(capsys, source, output)


def test_layers_beyond_the_count_are_not_dropped(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path], output: Path, capsys: Capture
) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint(layers=2), tmp_path / "source"))
    edit_json(folder / "config.json", num_hidden_layers=1)
    assert "model.layers.1.input_layernorm.weight" in refused_at_once(capsys, folder, output)


def test_keys_without_effect_are_tolerated(source: Path, output: Path) -> None:
    changes = {"parallel_attn": False, "unknown": None, "attention_dropout": 0.1, "_name": "x"}
    edit_json(source / "config.json", **changes, torch_dtype="bfloat16", pad_token_id=5)
    assert export_cli.main([str(source), "-o", str(output), *FAST]) == 0


def test_a_tensor_without_a_place_is_named(source: Path, output: Path, capsys: Capture) -> None:
    name = "model.layers.0.self_attn.q_norm.weight"
    edit_tensors(source, lambda t: t.update({name: np.ones(16, np.float32)}))
    assert f"a tensor '{name}'" in refused_at_once(capsys, source, output)


def test_tensors_that_do_not_fit(source: Path, output: Path, capsys: Capture) -> None:
    edit_tensors(source, lambda t: t.update({UP: np.ascontiguousarray(t[UP][:, :32])}))
    assert f"'{UP}' has shape [128, 32]" in refused_at_once(capsys, source, output)
    edit_tensors(source, lambda t: t.pop(UP))
    assert f"no tensor '{UP}'" in refused_at_once(capsys, source, output)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", [UP, "model.norm.weight", "model.embed_tokens.weight"])
def test_weights_that_are_not_finite(
    source: Path, output: Path, capsys: Capture, name: str, value: float
) -> None:
    edit_tensors(source, lambda t: t[name].reshape(-1).__setitem__(3, value))
    assert f"tensor {name} holds values that are not finite" in refused(capsys, source, output)
    assert not output.parent.exists()


@pytest.mark.parametrize("field", ["scales", "offsets"])
def test_kept_blocks_that_are_not_finite(field: str) -> None:
    parts = {"scales": np.ones((2, 1), np.float32), "offsets": np.ones((2, 1), np.float32)}
    parts[field][1, 0] = np.inf
    blocks = QuantBlocks(4, 32, np.zeros((2, 32), np.uint8), **parts)
    tensor = LazyTensor("w.weight", (2, 32), "Q4_1", blocks.dequantize, lambda: blocks)
    weight = weight_source.WeightSource({"w.weight": tensor}).weight("w")
    with pytest.raises(CheckpointError, match=r"tensor w\.weight .* not finite"):
        weight.blocks()


def test_frequency_factors_of_a_gguf_file_are_llama3_scaling(tmp_path: Path) -> None:
    """llama.cpp stores plain / scaled inverse frequencies in `rope_freqs.weight`."""
    shape = {"hidden_size": 64, "num_attention_heads": 4, "rope_theta": 500000.0}
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    expected = reference_frequencies({**shape, "rope_scaling": llama3})
    factors = (reference_frequencies(shape) / expected).astype(np.float32)
    assert factors[0] == 1 < factors[-1]
    raw = [("rope_freqs.weight", factors, GGMLQuantizationType.F32)]
    path = write_gguf(tmp_path / "model.gguf", raw=raw, llama__rope__freq_base=500000.0)
    with open_checkpoint(path) as checkpoint:
        (rope,) = spec_from_config(checkpoint.config).ropes
        (found,) = inverse_frequencies(rope)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_unknown_options(source: Path, output: Path, capsys: Capture) -> None:
    assert "form='round'" in refused(capsys, source, output, "--form", "round", code=2)
    with pytest.raises(SystemExit) as end:
        export_cli.main([str(source), "-o", str(output), "--precision", "w3"])
    assert end.value.code == 2
    assert "'w3'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="w8a8_row"):
        package.export_package(source, output, precision="w3")
    assert not output.parent.exists()


def test_outputs_that_may_not_be_written(
    source: Path, tmp_path: Path, output: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    output.mkdir(parents=True)
    (output / "diary.txt").write_text("mine")
    assert "exists already" in refused(capsys, source, output)
    assert "not a package" in refused(capsys, source, output, "--overwrite")
    assert contents(output) == {"diary.txt": b"mine"}
    below = output / "diary.txt" / "tiny"
    assert "diary.txt is not a folder" in refused(capsys, source, below)
    assert "exists already" in refused(capsys, source, tmp_path / "new" / "..")

    def deny(*_: object, **__: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(atomic_folder.tempfile, "mkdtemp", deny)
    line = refused(capsys, source, tmp_path / "new" / "tiny")
    assert "cannot write beside" in line
    assert "Permission denied" in line
    assert not (tmp_path / "new").exists()


def test_the_source_is_never_replaced(source: Path, exported: Path, capsys: Capture) -> None:
    inside = exported / "source"
    source.rename(inside)
    before = contents(exported)
    assert "is inside of" in refused(capsys, inside, exported, "--overwrite")
    assert contents(exported) == before
    weights = contents(inside)
    assert export_cli.main([str(inside), "-o", str(inside / "tiny"), *FAST, "-q"]) == 0
    assert {n: b for n, b in contents(inside).items() if not n.startswith("tiny")} == weights


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("may not mount a file system here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk(source: Path, small_disk: Path, capsys: Capture) -> None:
    assert "no space left" in refused(capsys, source, small_disk / "new" / "tiny")
    assert list(small_disk.iterdir()) == []
    kept = small_disk / "kept"
    kept.mkdir()
    (kept / "manifest.json").write_text("{}")
    assert "no space left" in refused(capsys, source, kept, "--overwrite")
    assert contents(small_disk) == {"kept/manifest.json": b"{}"}


STAGES = ["checked_spec", "calibrate", "build_decoder", "check_graph", "file_sha256"]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A job in the background is started with interrupts ignored."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("how", ["interrupt", "disk full"])
def test_an_export_that_ends_early_leaves_things_as_they_were(
    source: Path,
    exported: Path,
    output: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    how: str,
) -> None:
    def fail(*_: object, **__: object) -> None:
        if how == "interrupt":
            signal.raise_signal(signal.SIGINT)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(package, stage, fail)
    before = contents(exported.parent)
    options = ["--overwrite", "--kv-cache", "int8"]
    code = 130 if how == "interrupt" else 1
    expected = "nothing was written" if how == "interrupt" else "pace left"
    assert expected in refused(capsys, source, exported, *options, code=code)
    assert expected in refused(capsys, source, output, *options, code=code)
    assert contents(exported.parent) == before
    assert not output.parent.exists()


@pytest.mark.parametrize("error", [OSError(errno.EIO, "I/O error"), KeyboardInterrupt()])
def test_the_old_package_comes_back_if_the_new_one_cannot_take_its_place(
    exported: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    before = contents(exported.parent)
    move = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if (self / "new").exists():
            raise error
        return move(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with (
        pytest.raises((ExportError, KeyboardInterrupt)),
        atomic_folder.atomic_folder(exported, overwrite=True, keep=Path("other")) as folder,
    ):
        (folder / "new").touch()
    assert contents(exported.parent) == before
