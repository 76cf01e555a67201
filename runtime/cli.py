"""The command `headrace`. What a command needs is imported when it runs.

Exit codes: 0; 1 for a failure, with its reason in one line on the standard error; 2 for wrong
usage, a value that is out of range included; 130 when interrupted.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace.runtime.commands import serve, stored  # which import nothing before they run
from headrace.runtime.commands.options import (
    MODEL_HELP,
    add_draft,
    add_machine,
    add_package,
    add_sampling,
    engine_options,
    sampling_options,
)
from headrace.runtime.errors import ConfigError, HeadraceError

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_PIPE_CLOSED = 1, 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    _accept_any_text(sys.stdout, sys.stderr)
    args = _parser().parse_args(argv)
    logging.basicConfig(format="headrace: %(message)s", level=logging.WARNING)
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        code = command(args)
        sys.stdout.flush()  # here, where a closed pipe is still ours to handle
        return code
    except ConfigError as error:
        return _complain(error, EXIT_USAGE)
    except (HeadraceError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # The reader has gone. Nothing more may be written, not at interpreter exit either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_PIPE_CLOSED
        return _complain(error, EXIT_FAILED)
    except MemoryError:
        return _complain("ran out of memory; use fewer or shorter sequences", EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _complain(reason: object, code: int) -> int:
    print(f"headrace: {' '.join(str(reason).split())}", file=sys.stderr)
    return code


def _accept_any_text(*streams: Any) -> None:
    """Answers hold any character; a terminal that lacks one shows a question mark."""
    for stream in streams:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headrace", description="Decode language models: many sequences on little hardware."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_run(commands)
    _add_chat(commands)
    _add_embed(commands)
    _add_serve(commands)
    _add_bench(commands)
    _add_doctor(commands)
    _add_inspect(commands)
    _add_plan(commands)
    stored.add_commands(commands)
    return parser


def _add_run(commands: Any) -> None:
    parser = commands.add_parser("run", help="answer one prompt, word by word, or a file of them")
    add_package(parser)
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="the question; - reads standard input"
    )
    group = parser.add_argument_group(
        "many prompts", "Decoded together. A run that was ended is taken up by the same command."
    )
    group.add_argument(
        "--input",
        type=Path,
        metavar="FILE",
        help='JSON lines: {"prompt": TEXT} or {"messages": [...]}, with options of their own',
    )
    group.add_argument("--output", type=Path, metavar="FILE", help="answers, in the same order")
    add_draft(parser)
    add_sampling(parser)
    group = parser.add_argument_group(
        "form of the answer", "At most one; what does not fit is not written."
    ).add_mutually_exclusive_group()
    group.add_argument("--json-schema", type=Path, metavar="FILE", help="JSON that a schema allows")
    group.add_argument("--regex", metavar="TEXT", help="what an expression matches as a whole")
    group.add_argument("--grammar", type=Path, metavar="FILE", help="a grammar in Lark's notation")
    parser.add_argument("--raw", action="store_true", help="no chat template: go on with the text")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.set_defaults(command=_run)


def _add_chat(commands: Any) -> None:
    parser = commands.add_parser("chat", help="talk with the model")
    add_package(parser)
    add_draft(parser)
    add_sampling(parser)
    parser.set_defaults(command=_chat)


def _add_embed(commands: Any) -> None:
    parser = commands.add_parser("embed", help="turn texts into vectors, one JSON object each")
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="what to embed")
    parser.add_argument(
        "--input", type=Path, metavar="FILE", help='JSON lines: a string or {"text": ...} each'
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="instead of standard output")
    parser.add_argument(
        "--truncate", action="store_true", help="use the beginning of a text that is too long"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="threads inside the model")
    parser.set_defaults(command=_embed)


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser("serve", help="answer over HTTP, as OpenAI's API does")
    serve.add_arguments(parser)
    add_draft(parser)
    add_machine(parser)
    parser.set_defaults(command=_serve)


def _add_bench(commands: Any) -> None:
    parser = commands.add_parser("bench", help="measure this machine with this package")
    add_package(parser)
    parser.add_argument(
        "--batch",
        type=_counts,
        default=(1, 4, 16),
        metavar="LIST",
        help="numbers of sequences decoded together (default: 1,4,16)",
    )
    parser.add_argument("--prompt-tokens", type=_count, default=128, metavar="N")
    parser.add_argument("--new-tokens", type=_count, default=64, metavar="N")
    parser.add_argument("--repeat", type=_count, default=3, metavar="N", help="take the median of")
    group = parser.add_argument_group(
        "fidelity", "Instead of speed: how far the package is from the model it was made of."
    )
    group.add_argument(
        "--fidelity", type=Path, metavar="DIR", help="FP32 package of the same checkpoint"
    )
    group.add_argument("--text", type=Path, metavar="FILE", help="text to compare on")
    group.add_argument(
        "--skip",
        type=_share,
        default=0.0,
        metavar="SHARE",
        help="of the text to leave out from its start, such as 0.5",
    )
    group.add_argument("--text-tokens", type=_count, default=4096, metavar="N")
    group.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="JSON lines; answered with --new-tokens tokens at most",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.set_defaults(command=_bench)


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="what was found on this machine, chosen, and why")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.set_defaults(command=_doctor)


def _add_inspect(commands: Any) -> None:
    parser = commands.add_parser("inspect", help="what a package holds")
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--verify", action="store_true", help="compare every file with its SHA-256")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.set_defaults(command=_inspect)


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser("plan", help="what fits where, and how fast it could be")
    parser.add_argument("package", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--model", metavar="NAME", help="a shape by its name, such as gpt3-175b")
    parser.add_argument(
        "--devices",
        metavar="NxNAME",
        help="such as 4xA100-80GB, sharing the model; this machine's memory unless given",
    )
    parser.add_argument("--context-tokens", type=_count, metavar="N", help="of a sequence")
    parser.add_argument(
        "--sequences",
        type=_count,
        default=4,
        metavar="N",
        help="decoded together where ways to run MODEL are tried (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.set_defaults(command=_plan)


def _run(args: argparse.Namespace) -> int:
    from headrace.runtime.commands import run

    run.check_prompts(args)
    options = sampling_options(args) | run.grammar_option(args)
    if args.input is not None:
        from headrace.runtime.commands import run_many

        return run_many.run_many(args, engine_options(args), options)
    return run.run(args, engine_options(args), options)


def _chat(args: argparse.Namespace) -> int:
    from headrace.runtime.commands import chat

    return chat.chat(args, engine_options(args), sampling_options(args))


def _embed(args: argparse.Namespace) -> int:
    from headrace.runtime.commands import embed

    return embed.embed(args)


def _serve(args: argparse.Namespace) -> int:
    return EXIT_INTERRUPTED if serve.serve(args, engine_options(args)) else 0


def _bench(args: argparse.Namespace) -> int:
    if args.fidelity is not None:
        return _bench_fidelity(args)
    from headrace.runtime.commands import bench
    from headrace.runtime.commands.models import find_model

    options = engine_options(args)
    report = bench.measure(
        find_model(args.model, args.preset).package,
        batches=args.batch,
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
        repeats=args.repeat,
        device=args.device,
        engine_options=options,
        progress=_note_progress,
    )
    print(_json(report) if args.json else bench.render(report))
    return 0


def _bench_fidelity(args: argparse.Namespace) -> int:
    from headrace.runtime.commands import bench_fidelity
    from headrace.runtime.commands.models import find_model

    if args.text is None:
        raise ConfigError("text", None, "the file to compare on, with --fidelity")
    report = bench_fidelity.measure_fidelity(
        find_model(args.model, args.preset).package,
        args.fidelity,
        args.text,
        prompts=args.prompts,
        skip_share=args.skip,
        text_tokens=args.text_tokens,
        new_tokens=args.new_tokens,
        device=args.device,
        engine_options=engine_options(args),
        progress=_note_progress,
    )
    print(_json(report) if args.json else bench_fidelity.render(report))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from headrace.runtime.commands import doctor

    found = doctor.collect()
    print(_json(found.to_dict()) if args.json else doctor.render(found))
    return 0


def _plan(args: argparse.Namespace) -> int:
    from headrace.runtime.commands import plan

    return plan.plan(args, _note_progress)


def _inspect(args: argparse.Namespace) -> int:
    from headrace.runtime.commands import inspect
    from headrace.runtime.commands.models import find_model

    summary = inspect.summarize(find_model(args.model).package, verify=args.verify)
    print(_json(summary) if args.json else inspect.render(summary))
    return 0


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False)


def _note_progress(text: str) -> None:
    """On a terminal only: a line that the next one overwrites."""
    if sys.stderr.isatty():
        end = "\n" if not text else ""
        print(f"\r\033[K{text}", end=end, file=sys.stderr, flush=True)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not in [0, 1)")
    return value


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


class _Version(argparse.Action):
    """Looks the version up only when asked."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"headrace {version('headrace')}")
        parser.exit()


if __name__ == "__main__":
    raise SystemExit(main())
