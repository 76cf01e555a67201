"""Rules about files: their length, docstrings, and what must not be in them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from sources import CODE, INSTALLED, ROOT, Source, sources, tracked_files

MAX_LINES = 400

# File -> why it may be longer.
LONGER = {
    "tests/unit/test_api.py": "one front door, and the set-up that all of its tests share",
}

# Folders that exist on one machine or belong to one person.
PRIVATE_PATH = re.compile(
    r"(?<![\w.$}/])/(?:root|work|opt|mnt|srv|tmp|home/(?!user\b|\.\.\.)\w+|Users/(?!name\b)\w+)/\w"
    r"|[A-Z]:\\\\?Users\\"
)
TEXT_SUFFIXES = {".py", ".md", ".txt", ".toml", ".yml", ".yaml", ".json", ".cfg", ".sh", ""}
# Their point is a made-up path of this kind.
PATHS_ON_PURPOSE = {"tests/arch/test_files.py"}


def longer_than_allowed(found: tuple[Source, ...]) -> list[str]:
    counts = {source.name: source.text.count("\n") for source in found}
    return [f"{n}: {c} lines" for n, c in counts.items() if c > MAX_LINES and n not in LONGER]


def test_files_hold_one_idea() -> None:
    assert not longer_than_allowed(sources(*CODE))


def test_exceptions_to_the_length_are_needed() -> None:
    counts = {source.name: source.text.count("\n") for source in sources(*CODE)}
    assert not [name for name in LONGER if counts.get(name, 0) <= MAX_LINES]


def undocumented(tree: ast.Module) -> Iterator[str]:
    """Public names at the top of a module, and the module itself, that have no docstring.

    Left to judgement: methods (a protocol or the class may say it all) and what is short enough
    to be read at a glance.
    """
    if ast.get_docstring(tree) is None and tree.body:
        yield "the module"
    for node in tree.body:
        public = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if not isinstance(node, public) or node.name.startswith("_"):
            continue
        if ast.get_docstring(node) is None and not _says_it_all(node):
            yield node.name


def _says_it_all(node: ast.stmt) -> bool:
    return (node.end_lineno or node.lineno) - node.lineno <= 12


@pytest.mark.parametrize("source", sources(*INSTALLED), ids=lambda source: source.module)
def test_public_names_have_docstrings(source: Source) -> None:
    missing = list(undocumented(source.tree))
    assert not missing, f"{source.name}: {', '.join(missing)}"


def private_paths(text: str) -> list[str]:
    return [match.group() for match in PRIVATE_PATH.finditer(text)]


def test_no_paths_of_one_machine() -> None:
    problems = []
    for path in tracked_files():
        name = path.relative_to(ROOT).as_posix()
        if path.suffix in TEXT_SUFFIXES and name not in PATHS_ON_PURPOSE:
            text = path.read_text(encoding="utf-8", errors="replace")
            problems += [f"{name}: {found}" for found in private_paths(text)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "text", ["see /root/x", '"/home/ada/models"', "C:\\Users\\ada", "(/tmp/log)", "/Users/ada/m"]
)
def test_private_paths_are_found(text: str) -> None:
    assert private_paths(text)


@pytest.mark.parametrize("text", ["/proc/cpuinfo", "a/tmp/b", "/sys/fs", "/home/user/models"])
def test_public_paths_are_not(text: str) -> None:
    assert not private_paths(text)


def test_long_files_are_found() -> None:
    long = Source(ROOT / "runtime" / "x.py", "runtime.x", "\n" * (MAX_LINES + 1), ast.parse(""))
    assert longer_than_allowed((long,))
