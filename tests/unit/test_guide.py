"""The messages that docs/guide.md explains are ones that we raise, and its picture is right."""

from __future__ import annotations

import re
from pathlib import Path

from sources_of_guide import raised_text
from timeline import draw

from headrace.runtime.core import LaneRecord, RowRecord

GUIDE = (Path(__file__).parents[2] / "docs" / "guide.md").read_text(encoding="utf-8")


def test_every_message_is_raised_somewhere() -> None:
    table = GUIDE.split("## When something fails")[1]
    messages = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    assert len(messages) > 8
    text = raised_text()
    assert not [message for message in messages if message not in text]


def test_a_timeline_has_a_box_for_each_row() -> None:
    rows = (RowRecord(3, 1, 9, 0, 0, True), RowRecord(5, 2, 4, 3, 2, False))
    picture = draw([LaneRecord(1, 1.0, 10.0, rows), LaneRecord(2, 1.02, 10.0, rows[1:])])
    assert [picture.count(f'fill="{c}"') for c in ("#8c8c8c", "#f58518", "#4c78a8")] == [2, 3, 1]
    assert "lane 4" in picture
    assert "30 ms" in picture
