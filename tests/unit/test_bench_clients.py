"""`tools/bench/clients.py` against the real server and a tiny model: all it checks but times."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clients import WARM_UP_ROUNDS, Crowd, failures_of, measure, served, stop, table
from http_clients import nonsense, status_of


def test_bad_clients_change_nothing_for_the_others(tiny_package: Callable[..., Path]) -> None:
    package = tiny_package("w8a8_row", "int8", forms=("ragged",))
    crowd = Crowd(good=14, leaving=4, slow=2, nonsense=4, tokens=12)
    with served(package) as (process, url):
        figures = asyncio.run(measure(process, url, crowd, rounds=1))
        got = {kind: asyncio.run(status_of(url, sent)) for kind, sent in nonsense().items()}
        assert stop(process) == ""
    assert failures_of(figures, timed=False) == []
    good, mixed = (row["answers"] for row in figures["rounds"])
    assert (good, mixed) == ((WARM_UP_ROUNDS + 1) * crowd.good, crowd.good)
    oversized = {kind for kind, status in got.items() if status == 413}
    assert oversized == {"oversized", "oversized in pieces", "oversized by its word"}
    assert set(got.values()) == {400, 413}
    assert len(table(figures)) > 4


@pytest.mark.parametrize(
    ("change", "failure"),
    [
        ({"is_well": False}, "not well"),
        ({"rss_growth": 0.03}, "memory grew by 3.00%"),
        ({"nonsense": {"no JSON": {"200": 1, "400": 3}}}, "no JSON got ['200']"),
        ({"nonsense": {"no HTTP": {"0": 1}}}, "no HTTP got ['0']"),
    ],
)
def test_what_fails(change: dict[str, object], failure: str) -> None:
    assert failures_of(figures()) == []
    (found,) = failures_of({**figures(), **change})
    assert failure in found


@pytest.mark.parametrize(
    ("change", "failure"),
    [
        ({"other_answers": 1}, "1 answers differ"),
        ({"refused": {429: 2}}, "refused: {429: 2}"),
        ({"broken": ["request 3 ended"]}, "request 3 ended"),
        ({"first_token_s": [1.0, 2.1]}, "2.10 times"),
    ],
)
def test_what_fails_for_the_good(change: dict[str, object], failure: str) -> None:
    good, mixed = figures()["rounds"]
    (found,) = failures_of({**figures(), "rounds": [good, {**mixed, **change}]})
    assert failure in found


def figures() -> dict[str, Any]:
    row = {"other_answers": 0, "refused": {}, "broken": [], "first_token_s": [0.5, 1.0]}
    return {
        "is_well": True,
        "rounds": [{"round": "good alone", **row}, {"round": "with bad", **row}],
        "rss_growth": 0.01,
        "nonsense": {"no JSON": {"400": 3}},
    }
