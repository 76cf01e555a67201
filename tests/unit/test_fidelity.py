"""Fidelity of two models' logits, against definitions written out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace.runtime import cli
from headrace.runtime.commands import bench_fidelity
from headrace.runtime.errors import ConfigError, PackageError, RequestError
from headrace.runtime.fidelity import FidelityMeter, first_difference, spread_chunks
from headrace.runtime.text_files import read_text

Maker = Callable[..., Path]


def test_the_meter_follows_the_definitions() -> None:
    rng = np.random.default_rng(0)
    reference, model = rng.standard_normal((2, 40, 11)).astype(np.float32)
    next_ids = rng.integers(0, 11, 39).tolist()
    meter = FidelityMeter()
    meter.add(reference[:17], model[:17], next_ids[:17])
    meter.add(reference[17:], model[17:], next_ids[17:])
    found = meter.result()
    p, q = (np.exp(x.astype(np.float64)) for x in (reference, model))
    p, q = p / p.sum(axis=1, keepdims=True), q / q.sum(axis=1, keepdims=True)
    kl = (p * np.log(p / q)).sum(axis=1)
    assert found.num_tokens == 40
    assert found.mean_kl_nats == pytest.approx(kl.mean(), rel=1e-5)
    assert found.p99_kl_nats == pytest.approx(np.quantile(kl, 0.99), rel=1e-5)
    assert found.top1_agreement == (p.argmax(axis=1) == q.argmax(axis=1)).mean()
    taken = [np.exp(-np.log(d[np.arange(39), next_ids]).mean()) for d in (q, p)]
    assert [found.perplexity, found.perplexity_fp32] == pytest.approx(taken, rel=1e-5)
    assert found.perplexity_change == pytest.approx(taken[0] / taken[1] - 1, rel=1e-4)


def test_the_standard_error_is_that_of_draws() -> None:
    """Against the spread of the estimate itself over many texts; draws have unequal lengths."""
    rng = np.random.default_rng(2)
    reference = np.zeros((12, 2), np.float32)
    changes, errors = [], []
    for _ in range(300):
        meter = FidelityMeter()
        for tokens in rng.integers(1, 12, 40):
            model = np.zeros((tokens, 2), np.float32)
            model[:, 1] = rng.normal(0, 0.3)  # tokens of a draw have the same luck
            meter.add(reference[:tokens], model, [1] * int(tokens))
        found = meter.result()
        changes.append(found.perplexity_change)
        errors.append(found.perplexity_change_error)
    assert np.mean(errors) == pytest.approx(np.std(changes), rel=0.15)


def test_rows_that_do_not_count() -> None:
    """What the meter is given apart and in pieces, without the rows that are left out."""
    rng = np.random.default_rng(1)
    reference, model = rng.standard_normal((2, 20, 5)).astype(np.float32)
    whole, pieces = FidelityMeter(), FidelityMeter()
    whole.add(reference, model, [1] * 20)
    pieces.add(reference[:0], model[:0])
    pieces.add(reference, model, [1] * 20)
    assert whole.result() == pieces.result()


def test_no_next_tokens_no_perplexity() -> None:
    meter = FidelityMeter()
    meter.add(np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32))
    found = meter.result()
    assert (found.mean_kl_nats, found.top1_agreement) == (0, 1)
    assert math.isnan(found.perplexity) and math.isnan(found.perplexity_change_error)
    assert found.to_dict()["perplexity"] is None and found.to_dict()["num_tokens"] == 2


@pytest.mark.parametrize(
    ("length", "count", "expected"),
    [(0, 3, []), (4, 3, [(0, 4)]), (10, 3, [(0, 5), (5, 10)]), (100, 2, [(0, 5), (95, 100)])],
)
def test_chunks_are_spread_and_do_not_overlap(
    length: int, count: int, expected: list[tuple[int, int]]
) -> None:
    chunks = spread_chunks(range(length), count, 5)
    assert [(chunk[0], chunk[-1] + 1) for chunk in chunks] == expected


def test_first_difference() -> None:
    assert [first_difference([1, 2, 3], other) for other in ([1, 2, 3], [1, 5], [1, 2], [])] == [
        3,
        1,
        2,
        0,
    ]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("the other water then ran on over an inner terrain " * 40, encoding="utf-8")
    return file


def test_bench_compares_with_the_fp32_package(
    tiny_package: Maker, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package, reference = tiny_package("w8a8_row", "int8"), tiny_package("fp32")
    prompts = text.with_name("prompts.jsonl")
    prompts.write_text('"the ten"\n\n{"turns": ["an", "or"]}\n{"prompt": "he"}\n', encoding="utf-8")
    options = ["--fidelity", str(reference), "--text", str(text), "--new-tokens", "12"]
    options += ["--prompts", str(prompts), "--text-tokens", "600", "--skip", "0.25"]
    assert cli.main(["bench", str(package), *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert 0 < report["text"]["mean_kl_nats"] < report["text"]["p99_kl_nats"] < 1
    assert report["text"]["num_tokens"] == 512
    # Each answer token is predicted by the one before it, and the last token predicts one more.
    written = 3 * report["greedy"]["mean_answer_tokens"]
    assert report["answers"]["num_tokens"] == pytest.approx(written + 3)
    assert report["sampled"]["num_tokens"] > 3 and report["sampled"] != report["answers"]
    assert 0 <= report["greedy"]["equal_share"] <= 1
    assert report["greedy"]["mean_tokens_to_difference"] <= report["greedy"]["mean_answer_tokens"]
    assert cli.main(["bench", str(package), *options]) == 0
    assert "KL mean" in capsys.readouterr().out


def test_what_is_not_known_is_null(
    tiny_package: Maker, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One draw has no spread, and JSON no NaN."""
    text.write_text("the other water", encoding="utf-8")
    options = ["--fidelity", str(tiny_package("fp32")), "--text", str(text)]
    package = str(tiny_package("w8a8_row", "int8"))
    assert cli.main(["bench", package, *options, "--json"]) == 0

    def refuse(name: str) -> None:
        raise AssertionError(name)

    report = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert report["text"]["perplexity_change_error"] is None
    assert report["text"]["perplexity"] > 1
    assert cli.main(["bench", package, *options]) == 0
    assert "standard error unknown" in capsys.readouterr().out


def test_a_package_agrees_with_itself(tiny_package: Maker, text: Path) -> None:
    reference = tiny_package("fp32")
    report = bench_fidelity.measure_fidelity(reference, reference, text)
    assert report["text"]["mean_kl_nats"] == 0
    assert report["text"]["perplexity"] == report["text"]["perplexity_fp32"]
    assert report["greedy"] is None


def test_what_cannot_be_compared_is_refused(tiny_package: Maker, text: Path) -> None:
    package, reference = tiny_package("w8a8_row", "int8"), tiny_package("fp32")
    with pytest.raises(PackageError, match="--precision fp32"):
        bench_fidelity.measure_fidelity(package, package, text)
    with pytest.raises(PackageError, match="not of the same checkpoint"):
        bench_fidelity.measure_fidelity(package, tiny_package("fp32", seed=5), text)
    with pytest.raises(RequestError, match="too little text"):
        bench_fidelity.measure_fidelity(package, reference, text, skip_share=0.9999)
    for line in ("{", "17", '{"turns": []}'):
        text.with_name("bad.jsonl").write_text(line, encoding="utf-8")
        with pytest.raises(RequestError, match=r"bad\.jsonl, line 1"):
            bench_fidelity.measure_fidelity(
                package, reference, text, prompts=text.with_name("bad.jsonl")
            )


def test_bench_needs_a_text(tiny_package: Maker, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tiny_package("fp32"))
    assert cli.main(["bench", folder, "--fidelity", folder]) == cli.EXIT_USAGE
    assert "text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "empty"),
        (b" \n\t\n", "empty"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"a\0b", "binary"),
        (None, "can be read"),
    ],
)
def test_files_that_hold_no_text(tmp_path: Path, content: bytes | None, expected: str) -> None:
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=expected) as raised:
        read_text(file, "calibration_text")
    assert raised.value.field == "calibration_text"
