"""Options that several commands have. What it takes to check them is imported when they run."""

from __future__ import annotations

import argparse
from typing import Any

MODEL_HELP = "package, GGUF file, Hugging Face folder, or a name that `headrace list` shows"


def add_package(parser: argparse.ArgumentParser) -> None:
    """What loads a model takes."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_machine(parser)


def add_machine(parser: argparse.ArgumentParser) -> None:
    """How to use the machine."""
    group = parser.add_argument_group("machine")
    group.add_argument("--device", default="auto", help="auto (default), cuda or cpu")
    group.add_argument(
        "--preset", metavar="NAME", help="latency, throughput or low-memory; options go before it"
    )
    group.add_argument("--threads", type=int, metavar="N", help="threads inside the model")
    group.add_argument("--context-tokens", type=int, metavar="N", help="longest sequence")
    group.add_argument("--target", metavar="NAME", help="which of the package's targets")
    group.add_argument(
        "--max-draft-tokens", type=int, metavar="N", help="guessed ahead in a step; 0 for none"
    )
    group.add_argument(
        "--pipeline-depth",
        type=int,
        metavar="N",
        help="from 2 on text is made while the next step runs",
    )
    group.add_argument("--stages", type=int, metavar="N", help="parts of the graph, as exported")
    group.add_argument(
        "--micro-batches", type=int, metavar="N", help="parts of a step that flow through stages"
    )


def add_draft(parser: argparse.ArgumentParser) -> None:
    """A draft model."""
    parser.add_argument(
        "--draft", metavar="MODEL", help="smaller one with the same tokens that guesses ahead"
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """How to answer."""
    group = parser.add_argument_group(
        "sampling", "Defaults are the model's own; without one, 512 new tokens at most."
    )
    for name, kind in _SAMPLING.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before it; repeatable")
    parser.add_argument("--system", metavar="TEXT", help="system message")


_SAMPLING = {
    "max_new_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "seed": int,
}


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of `EngineConfig` that were set, and those of the preset.

    Raises:
        ConfigError: a value is out of range; found before a model is looked for.
        HeadraceError: there is no such draft model.
    """
    from headrace.runtime.commands.models import find_model
    from headrace.runtime.config import PRESETS, EngineConfig

    options = {
        "num_threads": args.threads,
        "context_tokens": args.context_tokens,
        "target": args.target,
        "max_draft_tokens": args.max_draft_tokens,
        "pipeline_depth": args.pipeline_depth,
        "stages": args.stages,
        "micro_batches": args.micro_batches,
    }
    options = {name: value for name, value in options.items() if value is not None}
    if args.preset is None:
        EngineConfig.from_dict(options)
    else:
        EngineConfig.preset(args.preset, **options)
        options = {**PRESETS[args.preset], **options}
    if draft := getattr(args, "draft", None):  # not where single steps are measured
        options["draft_package"] = str(find_model(draft).package)
    return options


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of `GenerationConfig` that were set.

    Raises:
        ConfigError: a value is out of range; found before a model is loaded.
    """
    from headrace.runtime.config import GenerationConfig

    names = (*_SAMPLING, "stop")
    options = {n: getattr(args, n) for n in names if getattr(args, n) is not None}
    GenerationConfig.from_dict(options)
    return options
