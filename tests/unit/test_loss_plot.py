"""Losses as CSV and SVG."""

from __future__ import annotations

from xml.etree import ElementTree

from headrace.exporters.train.loss_plot import loss_csv, loss_svg


def test_csv_has_a_line_for_each_number_of_steps() -> None:
    lines = loss_csv([0.5, 0.25], [(0, 0.75), (2, 0.2)], "kl").splitlines()
    assert lines == [
        "steps,train_kl_nats,held_out_kl_nats",
        "0,,0.750000",
        "1,0.500000,",
        "2,0.250000,0.200000",
    ]


def test_svg_draws_both_losses() -> None:
    root = ElementTree.fromstring(loss_svg([0.5, 0.25], [(0, 0.5), (2, 0.0)], "KL"))
    lines = [e for e in root if e.tag.endswith("polyline")]
    train, held_out = (
        [tuple(map(float, point.split(","))) for point in e.attrib["points"].split()] for e in lines
    )
    assert len(train) == len(held_out) == 2
    top, bottom = held_out[0][1], held_out[1][1]
    assert train[0][1] == top < train[1][1] < bottom  # half of the largest loss, from zero
    assert held_out[0][0] < train[0][0] < train[1][0] == held_out[1][0]


def test_nothing_measured_is_drawn_too() -> None:
    ElementTree.fromstring(loss_svg([], [], "KL"))
