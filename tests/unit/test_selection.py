"""Which weights get more bits: pure functions of costs, times and sizes."""

from __future__ import annotations

import pytest

from headrace.exporters.precision import FORMATS, PRECISIONS, Rule, first_match, parse_rule
from headrace.exporters.selection import (
    Upgrade,
    choose_bargains,
    choose_upgrades,
    keep_sensitive,
    predicted_us,
)
from headrace.runtime.errors import ConfigError

COSTS = {"a": 0.004, "b": 0.003, "c": 0.001}


def test_the_most_saved_for_its_time_comes_first() -> None:
    upgrades = [
        Upgrade("a", "block", 0.003, 10.0),
        Upgrade("b", "block", 0.002, 1.0),
        Upgrade("c", "block", 0.0009, 1.0),
    ]
    # 0.008 - 0.9 x 0.007 = 0.0017 have to go.
    assert [u.name for u in choose_upgrades(0.008, 0.007, COSTS, upgrades)] == ["b"]
    assert [u.name for u in choose_upgrades(0.008, 0.004, COSTS, upgrades)] == ["b", "c", "a"]
    assert choose_upgrades(0.008, 0.1, COSTS, upgrades) == []


def test_single_costs_are_scaled_to_the_joint_one() -> None:
    upgrades = [Upgrade(name, "block", nats, 1.0) for name, nats in COSTS.items()]
    # What was measured together is twice the sum: two thirds of it have to go either way.
    single = choose_upgrades(0.008, 0.003, COSTS, upgrades)
    assert single == choose_upgrades(0.016, 0.006, COSTS, upgrades)


def test_one_upgrade_a_weight_and_none_that_makes_it_worse() -> None:
    upgrades = [
        Upgrade("a", "block", 0.003, 1.0),
        Upgrade("a", "fp32", 0.004, 2.0),
        Upgrade("b", "block", -0.001, 1.0),
    ]
    chosen = choose_upgrades(0.008, 0.0001, COSTS, upgrades)
    assert [(u.name, u.format) for u in chosen] == [("a", "block")]


def test_bargains_are_taken_under_any_threshold() -> None:
    upgrades = [
        Upgrade("a", "fp32", 0.004, 90.0),  # all of a half for a tenth is no bargain
        Upgrade("a", "block", 0.0036, 50.0),  # 0.45 for 0.05 is one
        Upgrade("b", "block", 0.001, 50.0),
        Upgrade("c", "block", -0.0005, 0.0),
    ]
    chosen = choose_bargains(COSTS, 1000.0, upgrades)
    assert [(u.name, u.format) for u in chosen] == [("a", "block")]


def test_what_costs_most_for_its_size_is_kept() -> None:
    sizes = {"a": 400, "b": 100, "c": 90}
    assert keep_sensitive(COSTS, sizes, 200) == ["b", "c"]
    assert keep_sensitive(COSTS, sizes, 100) == ["b"]
    assert keep_sensitive(COSTS, sizes, 5) == []


def test_predicted_time() -> None:
    shape = (576, 1536)
    times = {name: predicted_us(shape, name) for name in FORMATS}
    assert times["w8a8_row"] == min(times.values())
    assert times["fp32"] == max(times.values())
    assert predicted_us((1152, 1536), "w8a8_row") == pytest.approx(2 * times["w8a8_row"])


def test_rules() -> None:
    rules = [parse_rule("*.0.mlp.*=fp32"), parse_rule("a=b=w8a8_row"), parse_rule("*q_proj=fp32")]
    assert rules[1] == Rule("a=b", "w8a8_row")
    assert first_match(rules, "layers.0.mlp.up") is rules[0]
    assert first_match(rules, "layers.1.q_proj+layers.1.k_proj") is rules[2]
    assert first_match(rules, "layers.1.Q_PROJ") is None
    for wrong in ("", "fp32", "=fp32", "a=", "a=int3"):
        with pytest.raises(ConfigError, match="PATTERN=FORMAT"):
            parse_rule(wrong)


def test_every_precision_names_formats() -> None:
    for precision in PRECISIONS.values():
        assert {precision.format, precision.head or "fp32", *precision.measured} <= FORMATS.keys()
