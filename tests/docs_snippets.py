"""Python code in the documentation, to be run as it is shown.

    for code in python_blocks(page): run(code)      # or run_page(page, folder)

Blocks of a page are run one after the other with the same names, as a reader would.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import CodeType

import pytest

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def python_blocks(page: Path) -> list[CodeType]:
    """The page's Python blocks, compiled so that an error tells the line of the page."""
    text = page.read_text(encoding="utf-8")
    blocks = []
    for match in _BLOCK.finditer(text):
        above = "\n" * text.count("\n", 0, match.start(1))
        blocks.append(compile(above + match[1], str(page), "exec"))
    return blocks


def run_page(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Run a page's blocks in a folder, which has what they name; returns what they defined."""
    monkeypatch.chdir(folder)
    names: dict[str, object] = {"__name__": "__main__"}
    blocks = python_blocks(page)
    assert blocks, f"{page} has no Python blocks"
    for block in blocks:
        exec(block, names)
    return names
