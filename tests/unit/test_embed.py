"""The embedder and its command on a tiny package: bad input, truncation, JSON lines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_bert import write_tiny_bert

from headrace.exporters.encoder_package import export_encoder
from headrace.runtime import Embedder, Runtime, cli
from headrace.runtime.errors import (
    ConfigError,
    EngineClosedError,
    PackageError,
    RequestError,
)

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    source = write_tiny_bert(folder / "source", max_seq_length=24)
    export_encoder(source, folder / "package", precision="fp32")
    return folder / "package"


@pytest.fixture(scope="module")
def embedder(package: Path) -> Embedder:
    return Embedder.load(package, num_threads=1)


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        ([], "no texts were given"),
        ([""], "text 0 is empty"),
        (["a", " \n"], "text 1 is empty"),
        ("a text", "must be a list of strings, not str"),
        ({"a": 1}, "must be a list of strings, not dict"),
        (None, "must be a list of strings, not NoneType"),
        (["a", 5], "text 1 must be a string, not int"),
        (["a", b"b"], "text 1 must be a string, not bytes"),
        (["a", "\ud800"], "text 1 holds lone surrogates"),
        (["a", "b " * 40], "text 1 has 42 tokens, but the model takes 24"),
    ],
)
def test_bad_texts_are_refused(embedder: Embedder, texts: object, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        embedder.embed(texts)  # type: ignore[arg-type]


def test_a_long_text_is_its_beginning_if_asked_for(embedder: Embedder) -> None:
    found = embedder.embed_all(["a", "b " * 40], truncate=True)
    assert (found.num_tokens, found.max_tokens) == ((3, 42), 24)
    np.testing.assert_allclose(found.vectors[1:], embedder.embed(["b " * 22]), atol=1e-6)


def test_any_iterable_of_texts(embedder: Embedder) -> None:
    texts = ("a", "b c")
    assert embedder.embed(iter(texts)).tobytes() == embedder.embed(texts).tobytes()  # type: ignore[arg-type]


def test_order_and_length_1(embedder: Embedder) -> None:
    texts = [f"{'word ' * (i % 4)}{i}" for i in range(50)]
    vectors = embedder.embed(texts)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(vectors[::-1], embedder.embed(texts[::-1]), atol=1e-6)


def test_a_closed_embedder_says_so(package: Path) -> None:
    with Embedder.load(package) as embedder:
        pass
    embedder.close()
    with pytest.raises(EngineClosedError, match="closed"):
        embedder.embed(["a"])


def test_each_kind_of_package_has_its_own_door(
    package: Path, tiny_package: Callable[..., Path]
) -> None:
    with pytest.raises(PackageError, match=r"is an encoder.*headrace embed"):
        Runtime.load(package)
    with pytest.raises(PackageError, match=r"is no encoder.*headrace run"):
        Embedder.load(tiny_package("fp32"))


def test_threads_beyond_the_allowance(package: Path) -> None:
    with pytest.raises(ConfigError, match="num_threads"):
        Embedder.load(package, num_threads=4096)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kind": "picture"}, "is no encoder"),
        ({"more": 1}, "unknown key 'more'"),
        ({"pooling": {"mode": "sum", "normalize": True, "stated": True}}, "mode='sum'"),
        ({"schema_version": 99}, "schema version 99"),
        ({"targets": []}, "no CPU target"),
    ],
)
def test_a_damaged_manifest(
    package: Path, tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    folder = Path(shutil.copytree(package, tmp_path / "copy"))
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    (folder / "manifest.json").write_text(json.dumps(manifest | change), "utf-8")
    with pytest.raises(PackageError, match=reason):
        Embedder.load(folder)


def test_another_tokenizer_is_noticed(package: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(package, tmp_path / "copy"))
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    manifest["tokenizer"]["golden"][0]["token_ids"][1] += 1
    (folder / "manifest.json").write_text(json.dumps(manifest), "utf-8")
    with pytest.raises(PackageError, match="other tokens of 'Hello, world!'"):
        Embedder.load(folder)


def test_texts_on_the_command_line(package: Path, embedder: Embedder, capsys: Capture) -> None:
    assert cli.main(["embed", str(package), "a b", "c"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["index"], line["num_tokens"]) for line in lines] == [(0, 4), (1, 3)]
    vectors = [line["embedding"] for line in lines]
    np.testing.assert_allclose(vectors, embedder.embed(["a b", "c"]), atol=1e-6)


def test_json_lines_in_and_out(package: Path, tmp_path: Path, capsys: Capture) -> None:
    texts, vectors = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    texts.write_text('"a b"\n\n{"text": "' + "c " * 40 + '"}\n', encoding="utf-8")
    command = ["embed", str(package), "--input", str(texts), "--output", str(vectors)]
    assert cli.main(command) == 1
    assert "--truncate" in capsys.readouterr().err and not vectors.exists()
    assert cli.main([*command, "--truncate"]) == 0
    assert capsys.readouterr().err == "headrace: 1 of 2 texts were cut to 24 tokens\n"
    lines = [json.loads(line) for line in vectors.read_text("utf-8").splitlines()]
    assert [line["truncated"] for line in lines] == [False, True]


@pytest.mark.parametrize(
    ("content", "reason"),
    [("not json\n", "in line 1"), ('"a"\n{"txt": "b"}\n', "in line 2"), ("\n", "is empty")],
)
def test_bad_json_lines(
    package: Path, tmp_path: Path, capsys: Capture, content: str, reason: str
) -> None:
    (tmp_path / "in.jsonl").write_text(content, encoding="utf-8")
    assert cli.main(["embed", str(package), "--input", str(tmp_path / "in.jsonl")]) == 2
    assert reason in capsys.readouterr().err


def test_texts_are_needed(package: Path, capsys: Capture) -> None:
    assert cli.main(["embed", str(package)]) == 2
    assert "one or more texts" in capsys.readouterr().err


def test_a_decoder_cannot_embed(tiny_package: Callable[..., Path], capsys: Capture) -> None:
    assert cli.main(["embed", str(tiny_package("fp32")), "a"]) == 1
    assert "is no encoder" in capsys.readouterr().err


def test_inspect(package: Path, capsys: Capture) -> None:
    assert cli.main(["inspect", str(package), "--verify"]) == 0
    shown = capsys.readouterr().out
    assert "bert encoder" in shown and "mean, normalized" in shown and "all hashes match" in shown
