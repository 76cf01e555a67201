"""`runtime-export train-heads` and `add-heads`: Medusa heads for a package."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.exporters.heads.add import add_heads
from headrace.exporters.heads.training import (
    HeadOptions,
    accuracy_lines,
    read_prompts,
    train_package_heads,
)
from headrace.exporters.heads.wanted import Wanted
from headrace.runtime.text_files import read_text

Report = Callable[[str, int, int], None]
COMMANDS = ("train-heads", "add-heads")


def parse(command: str, words: Sequence[str]) -> argparse.Namespace:
    """Arguments of one of `COMMANDS`, with `quiet` and what to `run` among them."""
    parser = _train_parser() if command == "train-heads" else _add_parser()
    return parser.parse_args(words)


def _train(args: argparse.Namespace, report: Report | None) -> str:
    text = "" if args.text is None else read_text(args.text, "text")
    prompts = () if args.prompts is None else read_prompts(args.prompts)
    options = HeadOptions(
        num_heads=args.heads, num_blocks=args.blocks, map_size=args.tokens, steps=args.steps
    )
    kept = train_package_heads(
        args.source,
        args.package,
        args.output,
        Wanted(prompts, args.answers, text),
        options,
        report or (lambda stage, done, total: None),
    )
    return "\n".join(
        [f"{args.output}: {len(kept['accuracy_by_rank'])} heads", *accuracy_lines(kept)]
    )


def _add(args: argparse.Namespace, report: Report | None) -> str:
    manifest = add_heads(args.source, args.package, args.heads)
    found = next(t.heads for t in manifest.targets if t.heads is not None)
    return (
        f"{args.package}: {found.num_heads} heads that choose among {found.vocab_size} tokens, "
        f"{found.weight_bytes / 1e6:.1f} MB of weights"
    )


def _train_parser() -> argparse.ArgumentParser:
    defaults = HeadOptions()
    parser = argparse.ArgumentParser(
        prog="runtime-export train-heads",
        description="Train Medusa heads on the hidden states of a package, which stays as it is. "
        "It answers prompts itself, and reads a text. State is kept in HEADS.train, and the same "
        "command takes it up after an interruption. Needs torch.",
    )
    parser.add_argument("source", type=Path, help="checkpoint that the package was made from")
    parser.add_argument("package", type=Path, help="package folder")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="HEADS")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help='lines {"turns": ["message", ...]}'
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="prose to read")
    _number(parser, "--answers", 3, "to each prompt; the first is greedy")
    _number(parser, "--heads", defaults.num_heads, "tokens to guess")
    _number(parser, "--blocks", defaults.num_blocks, "residual blocks of a head")
    _number(parser, "--tokens", defaults.map_size, "that heads choose among, the most frequent")
    _number(parser, "--steps", defaults.steps, "at most")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress, no summary")
    parser.set_defaults(run=_train, is_resumable=True)
    return parser


def _number(parser: argparse.ArgumentParser, name: str, default: int, words: str) -> None:
    text = f"{words} (default: %(default)s)"
    parser.add_argument(name, type=int, default=default, metavar="N", help=text)


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
