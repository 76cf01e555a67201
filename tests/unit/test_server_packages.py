"""Packages to serve: what each takes of a budget of memory, and what the budget leaves to it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_samples import serving
from tiny_bert import write_tiny_bert

from headrace.exporters.encoder_package import export_encoder
from headrace.runtime import Embedder, Runtime
from headrace.runtime.config import EngineConfig
from headrace.runtime.errors import ConfigError, PackageError
from headrace.runtime.factory import package_footprint
from headrace.runtime.footprint import Footprint, decoder_footprint, divide
from headrace.runtime.manifest import read_manifest
from headrace.runtime.server.packages import served_packages

CONFIG = EngineConfig(context_tokens=128, max_sequences=4, num_threads=1)
OPTIONS = {"context_tokens": 128, "max_sequences": 4, "num_threads": 1}

footprints = st.builds(
    lambda fixed, token, context, slots: Footprint(fixed, token, context, context * slots, token),
    st.integers(1, 1000),
    st.integers(1, 50),
    st.integers(1, 20),
    st.integers(1, 8),
) | st.builds(Footprint, st.integers(1, 1000))


@pytest.fixture(scope="module")
def packages(tiny_package: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages `one`, `two` and `rows`."""
    folder = tmp_path_factory.mktemp("packages")
    for name, precision in {"one": "fp32", "two": "fp32", "rows": "w8a8_row"}.items():
        shutil.copytree(tiny_package(precision), folder / name)
    return folder


def test_what_a_package_takes(packages: Path) -> None:
    found = package_footprint(packages / "one", "auto", CONFIG)
    manifest = read_manifest(packages / "one")
    (target,) = manifest.targets
    assert (found.least_tokens, found.most_tokens) == (128, 512)
    assert found.token_bytes == found.kv_token_bytes == target.kv_cache.bytes_per_token
    assert found.least_bytes == found.fixed_bytes + 128 * found.token_bytes
    assert found.fixed_bytes > target.weight_bytes + 4 * 16 * manifest.model.vocab_size * 8
    more = package_footprint(packages / "one", "cpu", replace(CONFIG, max_sequences=8))
    assert more.most_tokens == 1024 and more.fixed_bytes > found.fixed_bytes
    drafted = replace(CONFIG, draft_package=str(packages / "two"))
    both = package_footprint(packages / "one", "cpu", drafted)
    assert both == found.with_draft(found) and both.kv_token_bytes == found.kv_token_bytes
    assert both.token_bytes == 2 * found.token_bytes


@pytest.mark.parametrize(
    ("name", "copied"),
    [
        ("fp32", 0.25),
        ("w8a8_row", 0.0),
        ("w7a8_row", 0.0),
        ("w8a8_block/8bit", 0.5),
        ("w4a8_block64/4bit", 0.25),
        ("another", 0.5),
    ],
)
def test_copies_by_format(packages: Path, name: str, copied: float) -> None:
    manifest = read_manifest(packages / "one")
    tensor = replace(manifest.targets[0].tensors[0], format=name, bytes=2**30)
    none, one = (replace(manifest.targets[0], tensors=t) for t in ((), (tensor,)))
    sizes = [decoder_footprint(manifest.model, t, CONFIG).fixed_bytes for t in (none, one)]
    assert sizes[1] - sizes[0] == copied * 2**30


def test_what_a_card_holds_does_not_count(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.runtime.factory.choose_device", lambda *_: "cuda")
    assert package_footprint(packages / "one", "auto", CONFIG) == Footprint(0)


@given(st.lists(footprints, min_size=1, max_size=6), st.integers(0, 2000))
def test_shares_of_a_budget(found: list[Footprint], spare: int) -> None:
    """Each gets room for one sequence and never more than it can use; what fits together with that
    little still fits together; and nothing is left over that somebody could use."""
    budget = max(one.least_bytes for one in found) + spare
    parts = divide(found, budget)
    needs = [one.need_bytes(part) for one, part in zip(found, parts, strict=True)]
    for one, part in zip(found, parts, strict=True):
        assert one.least_tokens <= part <= one.most_tokens
    assert max(needs) <= budget
    least = sorted(((one.least_bytes, need) for one, need in zip(found, needs, strict=True)))
    together = 0
    for count in range(1, len(found) + 1):
        if sum(size for size, _ in least[-count:]) <= budget:
            together = count
    assert sum(sorted(needs)[-together:]) <= budget


def test_one_that_does_not_fit_is_named(packages: Path) -> None:
    named = [("rows", packages / "rows"), ("one", packages / "one")]
    need = package_footprint(packages / "one", "cpu", CONFIG).least_bytes
    assert package_footprint(packages / "rows", "cpu", CONFIG).least_bytes < need
    with pytest.raises(ConfigError, match=f"--memory-bytes={need - 1}.*at least {need}, .* one "):
        served_packages(named, "cpu", OPTIONS, need - 1)
    served = served_packages(named, "cpu", OPTIONS, need)
    assert list(served) == ["rows", "one"] and served["one"].need_bytes == need


def test_mistakes(packages: Path, tmp_path: Path) -> None:
    one = packages / "one"
    with pytest.raises(ConfigError, match="one model of the name a"):
        served_packages([("a", one), ("a", packages / "two")], "cpu", OPTIONS, None)
    with pytest.raises(PackageError, match="not a headrace package"):
        served_packages([("a", tmp_path)], "cpu", OPTIONS, None)


def test_packages_take_turns(packages: Path) -> None:
    """Answers are those of each package alone, and keys and values are held to the budget."""
    named = [(name, packages / name) for name in ("one", "rows")]
    budget = package_footprint(packages / "one", "cpu", CONFIG).least_bytes
    body = {"prompt": "one two", "max_tokens": 8}
    expected = {}
    for name, folder in named:
        with Runtime.load(folder, "cpu", config=CONFIG) as runtime:
            expected[name] = runtime.generate("one two", max_new_tokens=8).text
    with serving(served_packages(named, "cpu", OPTIONS, budget), budget_bytes=budget) as running:
        for name in ("one", "rows", "one"):
            answer = running.post("/v1/completions", {**body, "model": name})
            assert answer.json()["choices"][0]["text"] == expected[name]
            assert list(running.models.loaded) == [name]
            assert running.runtime(name).capabilities.kv_budget_tokens >= 128
        assert running.runtime("one").capabilities.kv_budget_tokens == 128
    without = served_packages(named, "cpu", OPTIONS, None)
    assert [served.need_bytes for served in without.values()] == [0, 0]


def test_encoders_count_too(tmp_path: Path) -> None:
    tiny_encoder = tmp_path / "package"
    export_encoder(write_tiny_bert(tmp_path / "source"), tiny_encoder, precision="fp32")
    found = package_footprint(tiny_encoder, "auto", CONFIG)
    assert found.token_bytes == 0 and found.least_bytes == found.fixed_bytes
    (served,) = served_packages([("e", tiny_encoder)], "auto", OPTIONS, 2**30).values()
    assert served.kind is Embedder and served.need_bytes == found.fixed_bytes
    model = served.load()
    assert isinstance(model, Embedder)
    model.close()
