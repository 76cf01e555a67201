from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizer_samples

from headrace.backends.cuda import provider
from headrace.backends.fake import FakeBackend
from headrace.backends.registry import choose_device
from headrace.runtime import EngineConfig, GenerationConfig, Runtime, factory
from headrace.runtime.errors import (
    BackendUnavailableError,
    ConfigError,
    PackageError,
    TemplateError,
)
from headrace.runtime.manifest import (
    FileInfo,
    KvCacheInfo,
    Manifest,
    ModelInfo,
    SourceInfo,
    TargetInfo,
    TokenizerInfo,
    file_sha256,
    read_manifest,
)

VOCAB = 300


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> list[FakeBackend]:
    """The fake backends that a load made in place of the real one."""
    made: list[FakeBackend] = []

    def create(device: str, folder: Path, manifest: Manifest, config: EngineConfig, _: Any) -> Any:
        made.append(FakeBackend(vocab_size=VOCAB, max_slots=config.max_sequences))
        return made[-1]

    monkeypatch.setattr(factory, "create_backend", create)
    return made


def write_package(folder: Path, extra: dict[str, str]) -> Path:
    """A package without graphs: a tokenizer, and files by name."""
    library = tokenizer_samples.byte_level()
    eos = library.token_to_id("<|im_end|>")
    assert eos is not None
    files = {"tokenizer.json": library.to_str(), **extra}
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    template = "chat_template.jinja" if "chat_template.jinja" in files else None
    manifest = Manifest(
        schema_version=1,
        generator="test",
        model=ModelInfo(
            architecture="llama",
            vocab_size=VOCAB,
            hidden_size=8,
            intermediate_size=8,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=8,
            context_tokens=256,
            tied_embeddings=True,
        ),
        source=SourceInfo(format="gguf", file="x.gguf", sha256=""),
        tokenizer=TokenizerInfo(
            file="tokenizer.json",
            bos_token_id=None,
            eos_token_ids=(eos,),
            add_bos=False,
            chat_template=template,
            golden=(),
        ),
        targets=(make_target("cpu_int8", "cpu"),),
        files=tuple(
            FileInfo(path=n, bytes=(folder / n).stat().st_size, sha256=file_sha256(folder / n))
            for n in files
        ),
    )
    (folder / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
    return folder


def make_target(name: str, device: str) -> TargetInfo:
    return TargetInfo(
        name=name,
        device=device,
        precision="w8a8_row",
        kv_cache=KvCacheInfo(dtype="int8", bytes_per_token=16),
        graphs=(),
        tensors=(),
        weight_bytes=0,
    )


def test_a_package_becomes_a_runtime(tmp_path: Path, backends: list[FakeBackend]) -> None:
    extra = {
        "generation_config.json": json.dumps({"do_sample": True, "temperature": 0.6, "top_k": 5}),
        "chat_template.jinja": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    folder = write_package(tmp_path, extra)
    with Runtime.load(folder, max_sequences=3, config=EngineConfig(max_waiting=7)) as runtime:
        assert runtime.capabilities.max_slots == 3
        assert runtime.default_config == GenerationConfig(temperature=0.6, top_k=5)
        options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
        text = runtime.generate("hello", **options).text
        assert text == runtime.chat([{"role": "user", "content": "hello"}], **options).text
        assert "".join(d.text for d in runtime.stream("hello", **options)) == text
    assert backends[0].closed


def test_optional_files_are_optional(tmp_path: Path, backends: list[FakeBackend]) -> None:
    with Runtime.load(str(write_package(tmp_path, {})), device="cpu") as runtime:
        assert runtime.default_config == GenerationConfig()


@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        ({"generation_config.json": "{"}, PackageError, "generation_config.json cannot be read"),
        ({"generation_config.json": "[" * 99999}, PackageError, "generation_config.json"),
        ({"generation_config.json": "[]"}, PackageError, "not a JSON object"),
        ({"generation_config.json": '{"top_p": 7}'}, PackageError, "top_p"),
        ({"chat_template.jinja": "{% if %}"}, TemplateError, "line 1"),
        ({"tokenizer.json": "{}"}, PackageError, "tokenizer"),
    ],
)
def test_damaged_packages_leave_nothing_open(
    tmp_path: Path,
    backends: list[FakeBackend],
    extra: dict[str, str],
    error: type[Exception],
    message: str,
) -> None:
    folder = write_package(tmp_path, extra)
    with pytest.raises(error, match=message):
        Runtime.load(folder)
    assert all(backend.closed for backend in backends)


def test_load_checks_its_arguments(tmp_path: Path, backends: list[FakeBackend]) -> None:
    with pytest.raises(PackageError, match="not a headrace package"):
        Runtime.load(tmp_path / "nothing")
    folder = write_package(tmp_path, {})
    with pytest.raises(ConfigError, match=r"n_ctx.*did you mean context_tokens"):
        Runtime.load(folder, n_ctx=100)
    with pytest.raises(ConfigError, match="max_sequences=0"):
        Runtime.load(folder, max_sequences=0)
    with pytest.raises(ConfigError, match="did you mean cuda"):
        Runtime.load(folder, device="cuda0")
    with pytest.raises(BackendUnavailableError, match="not for cuda; export it again"):
        Runtime.load(folder, device="cuda")
    assert not backends


def test_device_needs_a_target_of_the_package(tmp_path: Path) -> None:
    manifest = read_manifest(write_package(tmp_path, {}))
    assert choose_device("auto", manifest) == choose_device("cpu", manifest) == "cpu"
    other = replace(manifest, targets=(make_target("cuda_fp16", "cuda"),))
    with pytest.raises(BackendUnavailableError, match=r"graphs for cuda, not for cpu"):
        choose_device("cpu", other)


@pytest.mark.parametrize("works", [True, False])
def test_auto_takes_cuda_where_it_works(
    works: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(provider, "obstacle", lambda: None if works else "no card; buy one")
    manifest = read_manifest(write_package(tmp_path, {}))
    cuda = make_target("cuda_fp16", "cuda")
    both = replace(manifest, targets=(*manifest.targets, cuda))
    assert choose_device("cpu", both) == "cpu"
    assert choose_device("auto", both) == ("cuda" if works else "cpu")
    assert ("no card; buy one; using cpu" in caplog.text) is not works
    for device in ("auto", "cuda"):
        if works:
            assert choose_device(device, replace(both, targets=(cuda,))) == "cuda"
            continue
        with pytest.raises(BackendUnavailableError, match="'cuda' cannot be used: no card"):
            choose_device(device, replace(both, targets=(cuda,)))
