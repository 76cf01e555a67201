"""Damaged packages and bad requests: one clear line, and the requests beside them go on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from headrace.exporters.package import export_package
from headrace.runtime import Runtime, cli
from headrace.runtime.errors import (
    ConfigError,
    HeadraceError,
    PackageError,
    PromptTooLongError,
    RequestError,
    TemplateError,
)

Capture = pytest.CaptureFixture[str]
ESCAPE = "{{ cycler.__init__.__globals__.os.system('true') }}{{ ''.__class__.__mro__ }}"


@pytest.fixture
def exported(tmp_path: Path, tiny_package: Callable[..., Path]) -> Path:
    """A tiny package that the test may damage."""
    return Path(shutil.copytree(tiny_package("fp32"), tmp_path / "package"))


def failed(capsys: Capture, *args: str, code: int = 1) -> str:
    """Run `headrace`; it must fail in one line. The line."""
    assert cli.main(list(args)) == code
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    return printed.err


def replace_file(package: Path, name: str, content: bytes) -> None:
    """Another content, with the manifest saying the new size: only a hash can tell."""
    (package / name).write_bytes(content)
    edit_manifest(
        package,
        lambda m: [f.update(bytes=len(content)) for f in m["files"] if f["path"] == name],
    )


def edit_manifest(package: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((package / "manifest.json").read_text("utf-8"))
    change(manifest)
    (package / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def package_files(package: Path) -> list[str]:
    return [f["path"] for f in json.loads((package / "manifest.json").read_text("utf-8"))["files"]]


def test_a_changed_byte_is_found_on_request(exported: Path, capsys: Capture) -> None:
    for name in package_files(exported):
        path = exported / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert cli.main(["inspect", str(exported)]) == 0
        capsys.readouterr()
        assert f"{name} was changed" in failed(capsys, "inspect", str(exported), "--verify")
        path.write_bytes(whole)


def test_a_missing_or_shorter_file_is_found_always(exported: Path, capsys: Capture) -> None:
    for name in package_files(exported):
        path = exported / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        assert f"{name} has {len(whole) - 1} bytes" in failed(capsys, "run", str(exported), "hi")
        path.unlink()
        assert f"{name} is missing" in failed(capsys, "run", str(exported), "hi")
        assert f"{name} is missing" in failed(capsys, "inspect", str(exported))
        path.write_bytes(whole)


@pytest.mark.parametrize("content", [b"", b"garbage" * 99, b"\0" * 64, None])
def test_graphs_that_are_none(exported: Path, capsys: Capture, content: bytes | None) -> None:
    name = next(name for name in package_files(exported) if name.endswith("ragged.onnx"))
    half = (exported / name).read_bytes()[:1000]
    replace_file(exported, name, half if content is None else content)
    assert "ragged.onnx" in failed(capsys, "run", str(exported), "hi")


def _first_target(manifest: dict[str, Any]) -> dict[str, Any]:
    target: dict[str, Any] = manifest["targets"][0]
    return target


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["model"].update(vocab_size=2**30),
        lambda m: m["model"].update(num_layers=10**30),
        lambda m: m["model"].update(context_tokens=0),
        lambda m: _first_target(m)["kv_cache"].update(bytes_per_token=0),
        lambda m: _first_target(m)["kv_cache"].update(dtype="int3"),
        lambda m: _first_target(m)["graphs"][0].update(min_onnxruntime="new"),
        lambda m: _first_target(m)["graphs"][0].update(file="../../ragged.onnx"),
        lambda m: m.update(schema_version=99),
        lambda m: m.pop("model"),
    ],
)
def test_manifests_that_make_no_sense(
    exported: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    edit_manifest(exported, change)
    with pytest.raises(PackageError):
        Runtime.load(exported)


def test_folders_that_are_no_package(tmp_path: Path, capsys: Capture) -> None:
    assert "not a headrace package" in failed(capsys, "run", str(tmp_path), "hi")
    nothing = str(tmp_path / "nothing")
    assert f"there is no model {nothing!r}" in failed(capsys, "run", nothing, "hi")
    assert f"there is no model {nothing!r}" in failed(capsys, "inspect", nothing)
    (tmp_path / "manifest.json").write_bytes(b"\xff{")
    assert "manifest.json cannot be read" in failed(capsys, "inspect", str(tmp_path))


def test_templates_that_try_to_escape(exported: Path, capsys: Capture) -> None:
    replace_file(exported, "chat_template.jinja", ESCAPE.encode())
    assert "chat template" in failed(capsys, "run", str(exported), "hi")
    with Runtime.load(exported, max_sequences=1) as runtime:
        with pytest.raises(TemplateError, match="unsafe"):
            runtime.chat([{"role": "user", "content": "hi"}])
        assert runtime.generate("hi", max_new_tokens=1).token_ids


def test_a_hostile_template_is_not_exported_with_a_calibrated_cache(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    source = Path(shutil.copytree(tiny_checkpoint(layers=1), tmp_path / "source"))
    (source / "chat_template.jinja").write_text(ESCAPE, encoding="utf-8")
    with pytest.raises(TemplateError, match="unsafe"):
        export_package(source, tmp_path / "out" / "tiny", kv_cache="int8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--temperature", "nan"], "temperature=nan"),
        (["--top-p", "2"], "top_p=2.0"),
        (["--top-p", "nan"], "top_p=nan"),
        (["--min-p", "nan"], "min_p=nan"),
        (["--bench"], "--prompt-tokens"),
    ],
)
def test_values_are_named(
    exported: Path, capsys: Capture, options: list[str], expected: str
) -> None:
    if options == ["--bench"]:  # found before a prompt of that length is made
        huge = ["--prompt-tokens", str(10**12)]
        assert "exceed the context" in failed(capsys, "bench", str(exported), *huge)
    else:
        assert expected in failed(capsys, "run", str(exported), "hi", *options, code=2)


BAD_REQUESTS: list[tuple[Any, dict[str, Any], type[HeadraceError]]] = [
    ("", {}, RequestError),
    ([[]], {}, RequestError),
    ("x" * 600, {}, PromptTooLongError),
    ([1] * 512, {}, PromptTooLongError),
    ([0, 256], {}, RequestError),
    ([-1], {}, RequestError),
    ([10**30], {}, RequestError),
    ([1.5], {}, RequestError),
    ([float("nan")], {}, RequestError),
    ("\ud800", {}, RequestError),
    (None, {}, RequestError),
    ("hi", {"temperature": -1}, ConfigError),
    ("hi", {"temperature": float("nan")}, ConfigError),
    ("hi", {"temperature": 10**400}, ConfigError),
    ("hi", {"top_p": 2}, ConfigError),
    ("hi", {"logit_bias": {3: float("nan")}}, ConfigError),
    ("hi", {"logit_bias": {10**9: 1.0}}, RequestError),
    ("hi", {"n": 10**12}, ConfigError),
    ("hi", {"stop": [""]}, ConfigError),
    ("hi", {"temprature": 1}, ConfigError),
]


def test_bad_requests_disturb_nobody(exported: Path) -> None:
    options = {"max_new_tokens": 300, "temperature": 0.0, "ignore_eos": True}
    with Runtime.load(exported, max_sequences=2) as runtime:
        alone = runtime.generate("a neighbour", **options).token_ids
        deltas = runtime.stream("a neighbour", **options)
        seen = list(next(deltas).token_ids)
        for prompt, bad, error in BAD_REQUESTS:
            with pytest.raises(error) as caught:
                runtime.generate(prompt, **bad)
            assert "\n" not in str(caught.value)
        seen += [token for delta in deltas for token in delta.token_ids]
    assert tuple(seen) == tuple(alone)


def test_tokens_that_the_embedding_lacks(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    """A tokenizer may know more ids than the model: calibration leaves them out, prompts fail."""
    source = Path(shutil.copytree(tiny_checkpoint(layers=1), tmp_path / "source"))
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_tokens(["one", "two", "three", "four", " the", " of"])  # 253 to 258, of 256 rows
    tokenizer.save(str(source / "tokenizer.json"))
    folder = tmp_path / "tiny"
    export_package(source, folder, kv_cache="int8", forms=("ragged",))
    with Runtime.load(folder, max_sequences=1) as runtime:
        with pytest.raises(RequestError, match="token 256, but the vocabulary has 256"):
            runtime.generate("four", max_new_tokens=1)
        assert runtime.generate("three", max_new_tokens=1).token_ids
