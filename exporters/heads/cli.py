"""`runtime-export add-heads`: Medusa heads for a package that is there already."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.exporters.heads.add import add_heads

Report = Callable[[str, int, int], None]
COMMANDS = ("add-heads",)


def parse(command: str, words: Sequence[str]) -> argparse.Namespace:
    """Arguments of one of `COMMANDS`, with `quiet` and what to `run` among them."""
    return _add_parser().parse_args(words)


def _add(args: argparse.Namespace, report: Report | None) -> str:
    manifest = add_heads(args.source, args.package, args.heads)
    found = next(t.heads for t in manifest.targets if t.heads is not None)
    return (
        f"{args.package}: {found.num_heads} heads that choose among {found.vocab_size} tokens, "
        f"{found.weight_bytes / 1e6:.1f} MB of weights"
    )


def _add_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="runtime-export add-heads",
        description="Put Medusa heads into a package, in place of any that it has. Texts stay the "
        "same; they are written faster where the heads guess well.",
    )
    parser.add_argument("source", type=Path, help="checkpoint that the package was made from")
    parser.add_argument("package", type=Path, help="package folder, which is changed")
    parser.add_argument(
        "heads", type=Path, help="folder with config.json and medusa_lm_head.safetensors"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="no summary")
    parser.set_defaults(run=_add)
    return parser
