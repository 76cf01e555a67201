"""The benchmarks run: on a tiny package, where their figures mean nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import common
import lockstep
import policies
import pytest
from dev import ROOT

from headrace.runtime.manifest import read_manifest

PackageMaker = Callable[..., Path]


def bench(name: str, *args: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "tools" / "bench" / f"{name}.py"), *args, "--json"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["hardware"]["usable_cores"] >= 1
    assert "onnxruntime" in figures["versions"]
    return dict(figures)


def test_compare(tiny_package: PackageMaker) -> None:
    pair = [f"a={tiny_package('fp32')}", f"b={tiny_package('fp32')}"]
    small = ["--prefill", "16", "--rows", "1,3", "--contexts", "8,40", "--rounds", "2"]
    cases = bench("compare", *pair, *small)["cases"]
    assert [c["case"] for c in cases] == [
        "prefill 16",
        *(f"decode {rows} x {context}" for context in (8, 40) for rows in (1, 3)),
    ]
    for case in cases:
        assert min(case["tok_s"].values()) > 0
        assert case["ratios"]["a/b"] > 0


def test_tradeoff(tiny_package: PackageMaker, tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    (tmp_path / "text").write_text("some words to compare on " * 20)
    pair = [f"exact={tiny_package('fp32')}", f"<small>={tiny_package('w8a8_row')}"]
    small = ["--rows", "1,2", "--context", "8", "--rounds", "1", "--text-tokens", "32"]
    points = bench("tradeoff", *pair, *small, "--text", str(tmp_path / "text"), "-o", str(picture))[
        "points"
    ]
    assert [point["kl_nats"] > 0 for point in points] == [False, True]
    assert all(min(point["tok_s"].values()) > 0 for point in points)
    text = picture.read_text(encoding="utf-8")
    assert text.count("<circle") == 4 and "&lt;small&gt;" in text and "2 sequences" in text


def test_limit(tiny_package: PackageMaker) -> None:
    package = tiny_package("fp32")
    cases = bench("limit", str(package), "--contexts", "8,40", "--rounds", "2")["cases"]
    weights, cache = ((target := read_manifest(package).targets[0]).weight_bytes, target.kv_cache)
    looked_up = sum(t.bytes for t in target.tensors if "embed_tokens" in t.name)
    has_head = any(t.name.startswith("lm_head") for t in target.tensors)
    read = weights - (looked_up if has_head else 0)
    assert [c["bytes"] - read for c in cases] == [n * cache.bytes_per_token for n in (8, 40)]
    assert all(c["share"] > 0 and c["limit_ms"] > 0 for c in cases)


def test_host_share(tiny_package: PackageMaker) -> None:
    small = ["--rows", "1,2", "--steps", "4", "--rounds", "2"]
    cases = bench("host_share", str(tiny_package("fp32")), *small)["cases"]
    assert [c["rows"] for c in cases] == [1, 2, 1, 2]
    assert all(c["outside_share"] < 1 and c["bare_ms"] > 0 for c in cases)


def test_gate() -> None:
    cases = bench("gate", "--sequences", "1,3", "--steps", "9", "--rounds", "1")["cases"]
    assert [c["sequences"] for c in cases] == [1, 1, 1, 3, 3, 3]
    assert all(0 < c["share"] < 1 and c["tokens"] >= c["sequences"] for c in cases)


def test_verification(tiny_package: PackageMaker, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"category": "qa", "turns": ["Who?"]}\n', encoding="utf-8")
    large, small = str(tiny_package("fp32")), str(tiny_package("fp32", seed=5))
    ((same,), (other,)) = (
        bench("verification", large, draft, str(prompts))["cases"] for draft in (large, small)
    )
    assert same["category"] == "qa" and same["positions"] == other["positions"] > 10
    assert same["coupled"] == 1.0 and same["rejection"] == pytest.approx(1.0)
    assert 0 < same["greedy"] < 1 and other["coupled"] < 0.5


def test_policies(tiny_package: PackageMaker, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"category": "echo", "turns": [text * 4]} for text in ("one two. ", "go on. ")]
    prompts.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    sides = ["static", "plain", "fixed"]
    small = ["--sequences", "2", "--requests", "1", "--rounds", "1", "--long-tokens", "90"]
    package = str(tiny_package("w8a8_row", "int8"))
    found = bench("policies", package, str(prompts), *small, "--sides", *sides)
    (cell,) = found["cells"]
    assert (cell["category"], cell["sequences"], cell["requests"]) == ("echo", 2, 2)
    assert cell["best_fixed"] in (1, 2, 3, 4, 6, 8)
    assert set(cell["sides"]) == {*sides, "policy"}
    for side in cell["sides"].values():
        assert all(value > 0 for value in side.values())


def test_sides_take_turns_by_clocks_of_their_own(tiny_package: PackageMaker) -> None:
    package = tiny_package("w8a8_row", "int8")
    backend, caps = common.load_backend(package, slots=6, context_tokens=64, threads=None)
    jobs = [lockstep.Job((5, 6, 7 + i), n) for i, n in enumerate((3, 20, 9, 4))]
    ways = {
        "kept": lockstep.Way(in_batches=True, keeps_rows=True),
        "batches": lockstep.Way(in_batches=True),
        "plain": lockstep.Way(),
    }
    start = time.perf_counter()
    kept, batches, plain = lockstep.run((backend, caps), ways, jobs, 2).values()
    assert sum(side.seconds for side in (kept, batches, plain)) < time.perf_counter() - start
    assert kept.written == batches.written == plain.written
    assert [len(plain.written[i]) for i in range(4)] == [3, 20, 9, 4]
    assert kept.num_steps >= batches.num_steps > plain.num_steps
    first, second, third, last = kept.latencies_s
    assert first == second < third == last <= kept.seconds
    assert plain.latencies_s[0] == plain.stamps_s[0][-1] < plain.latencies_s[1]
    assert len(plain.window_ms) == (20 - 8) + (9 - 8)
    backend.close()


@pytest.mark.parametrize(
    ("text", "is_loop"),
    [("a b c d " * 20, True), ("yes " * 9, True), ("the quick brown fox jumps over it", False)],
)
def test_loops_are_found(text: str, is_loop: bool) -> None:
    words = text.split()
    assert policies.loops([words.index(word) for word in words]) == is_loop


def test_memory(tiny_package: PackageMaker) -> None:
    figures = bench("memory", str(tiny_package("fp32")), "--tokens", "80")
    peaks = [figures[f"{name}_rss_bytes"] for name in ("import", "load", "peak")]
    assert 0 < peaks[0] <= peaks[1] <= peaks[2]


def test_soak(tiny_package: PackageMaker) -> None:
    package = str(tiny_package("fp32"))
    figures = bench("soak", package, "--requests", "150", "--warm-up", "100")
    assert sum(figures["ends"].values()) == 150
    assert figures["ends"].keys() == {"length", "cancelled"}


def test_packages_have_names() -> None:
    assert common.named_package("row=a/b") == ("row", Path("a/b"))
    assert common.named_package("a/b") == ("b", Path("a/b"))


def test_turns_are_taken() -> None:
    order: list[str] = []

    def measure(name: str) -> float:
        order.append(name)
        return float(len(order))

    values = common.take_turns({n: partial(measure, n) for n in "ab"}, rounds=2)
    assert order == list("ababab")
    assert values == {"a": [3.0, 5.0], "b": [4.0, 6.0]}
    assert common.pair_ratio(values, "a", "b") == pytest.approx((3 / 4 + 5 / 6) / 2)


def test_plan(tiny_package: PackageMaker) -> None:
    small = ["--sequences", "2", "--steps", "3", "--rounds", "1"]
    found = bench("plan", f"tiny={tiny_package('fp32')}", *small)["packages"]["tiny"]
    assert 0 < found["share_of_best"] <= 1
    assert any(found["chosen"].items() <= way.items() for way in found["ways"])
