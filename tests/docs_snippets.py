"""Python code and commands in the documentation, to be run as they are shown.

    for code in python_blocks(page): run(code)      # or run_page(page, folder)
    for words in commands(page): ...

Blocks of a page are run one after the other with the same names, as a reader would.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from types import CodeType

import pytest

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMANDS = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`((?:headrace|runtime-export) [^`]+)`")


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


def commands(page: Path) -> list[list[str]]:
    """Words of each line of the page's blocks of commands, without comments."""
    blocks = _COMMANDS.findall(page.read_text(encoding="utf-8"))
    lines = [line for block in blocks for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def mentions(page: Path) -> list[tuple[str, str]]:
    """Commands named in passing; one that a row of a table is about with the row's other code."""
    found = []
    for line in page.read_text(encoding="utf-8").splitlines():
        for command in _INLINE.findall(line):
            is_about = line.startswith(f"| `{command.split()[0]} ")
            others = re.findall(r"`([^`]+)`", line) if is_about else [command]
            found.append((command, " ".join(others)))
    return found
