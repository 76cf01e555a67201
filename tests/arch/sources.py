"""The checkout as data for the architecture tests: modules, what they import, what they define."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = ("runtime", "backends", "exporters")
CODE = (*INSTALLED, "tools", "tests", "examples")


@dataclass(frozen=True, slots=True)
class Source:
    """One Python file. `module` is its name below `headrace.`, e.g. "runtime.core"."""

    path: Path
    module: str
    text: str = field(repr=False)
    tree: ast.Module = field(repr=False)

    @property
    def name(self) -> str:
        """Path within the checkout, with forward slashes."""
        return self.path.relative_to(ROOT).as_posix()


@cache
def sources(*folders: str) -> tuple[Source, ...]:
    """All Python files below these folders, in order of their names."""
    found = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            parts = path.relative_to(ROOT).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found.append(Source(path, module, text, ast.parse(text, str(path))))
    assert found, f"no Python files below {folders}"
    return tuple(found)


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported, inside functions too.

    `from a.b import c` gives "a.b.c": whether `c` is a module does not matter to rules that
    compare prefixes. Relative imports give names that start with a dot.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a dotted name is one of the prefixes or below one."""
    return any(name == p or name.startswith(p + ".") for p in prefixes)


@cache
def tracked_files() -> tuple[Path, ...]:
    """Text files under version control; without git, the files that would be."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
        ).stdout.decode()
        names = [name for name in listed.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        names = [s.name for s in sources(*CODE)]
    return tuple(ROOT / name for name in names if (ROOT / name).is_file())
