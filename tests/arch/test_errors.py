"""What is raised: the tree of runtime/errors.py, and other errors only where listed."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache

import pytest
from sources import INSTALLED, Source, sources

from headrace.runtime import errors

TREE = frozenset(
    name
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, errors.HeadraceError)
)

# (module, error) -> why it raises an error that is not of the tree.
OTHERS = {
    ("runtime", "AttributeError"): "what a module's __getattr__ has to raise",
    ("runtime.prompts", "TypeError"): "caught in the same function, with Python's own",
    ("runtime.cli", "ArgumentTypeError"): "how a type tells argparse of wrong usage",
    ("runtime.commands.serve", "ArgumentTypeError"): "how a type tells argparse of wrong usage",
    (
        "runtime.mailbox",
        "LoopClosedError",
    ): "asyncio's RuntimeError, for the worker to catch",
    ("runtime.chat.tool_calls", "JSONDecodeError"): "caught in the caller, with the decoder's own",
    ("runtime.worker", "TimeoutError"): "what a wait with a timeout raises all over Python",
    ("runtime.chat.sandbox", "SecurityError"): "Jinja's; ChatTemplate makes it a TemplateError",
    ("runtime.chat.sandbox", "LimitError"): "a SecurityError",
    ("runtime.chat.sandbox_limits", "LimitError"): "a SecurityError",
}
# `assert` in the place of an expression; how a script ends.
EVERYWHERE = {"AssertionError", "SystemExit"}


def raised(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and class name of every `raise X` and `raise X(...)` where X is a class.

    Names in lower case are variables: an error caught or made before, raised on.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.Raise) or node.exc is None:
            continue
        target = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        name = target.attr if isinstance(target, ast.Attribute) else ast.unparse(target)
        if name[:1].isupper():
            yield node.lineno, name


@cache
def family(roots: frozenset[str]) -> frozenset[str]:
    """Names of the classes that derive from one of `roots` anywhere in the code."""
    bases = {
        node.name: {ast.unparse(base).split(".")[-1] for base in node.bases}
        for source in sources(*INSTALLED)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
    }
    known = roots
    while grown := {name for name, above in bases.items() if above & known} - known:
        known |= grown
    return known


def foreign_raises(source: Source) -> list[str]:
    """Every raise that neither the tree nor a table above explains."""
    return [
        f"{source.name}:{line}: raises {name}"
        for line, name in raised(source.tree)
        if name not in family(TREE) | EVERYWHERE and (source.module, name) not in OTHERS
    ]


@pytest.mark.parametrize("source", sources(*INSTALLED), ids=lambda source: source.module)
def test_raises_only_errors_of_the_tree(source: Source) -> None:
    assert not foreign_raises(source)


def test_exceptions_to_the_tree_are_needed() -> None:
    used = {(s.module, name) for s in sources(*INSTALLED) for _, name in raised(s.tree)}
    assert not OTHERS.keys() - used


@pytest.mark.parametrize(
    "line", ["raise ValueError('x')", "raise RuntimeError", "raise a.KeyError"]
)
def test_foreign_raises_are_found(line: str) -> None:
    source = Source(sources("runtime")[0].path, "runtime.x", line, ast.parse(line))
    assert foreign_raises(source)


def test_the_tree_is_drawn_whole() -> None:
    """The docstring of runtime/errors.py shows every class."""
    for name in TREE:
        assert name in (errors.__doc__ or "")
