"""`headrace pull`, `list` and `rm`: the models that are kept on this machine."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from typing import Any


def add_commands(commands: Any) -> None:
    """The parsers of the three commands; what they need is imported when they run."""
    parser = commands.add_parser("pull", help="fetch a model and keep it")
    parser.add_argument(
        "address", metavar="ADDRESS", help="hf://ORG/REPO/FILE.gguf, https://... or file:///PATH"
    )
    parser.add_argument("--name", help="to call it (default: the file's own)")
    parser.add_argument("--sha256", metavar="HEX", help="that the file must have")
    parser.set_defaults(command=_pull)
    parser = commands.add_parser("list", help="models that are kept, and packages made of them")
    parser.add_argument("--json", action="store_true", help="print a JSON array")
    parser.set_defaults(command=_list)
    parser = commands.add_parser("rm", help="remove a model and what was made of it")
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.set_defaults(command=_rm)


def _pull(args: argparse.Namespace) -> int:
    from headrace.runtime.commands.models import say
    from headrace.runtime.commands.progress import megabytes, progress_line
    from headrace.runtime.store.download import Progress
    from headrace.runtime.store.models import pull
    from headrace.runtime.store.references import checked_sha256, parse_reference

    sha256 = None if args.sha256 is None else checked_sha256(args.sha256)
    reference = parse_reference(args.address, has_sha256=sha256 is not None)
    name = reference.name if args.name is None else args.name
    with ExitStack() as lines:

        def stage(title: str) -> Progress:
            lines.close()
            return lines.enter_context(progress_line(title, megabytes))

        try:
            model, is_new = pull(reference, name, sha256, stage)
        except KeyboardInterrupt:
            lines.close()
            say("interrupted; the same command goes on")
            raise
    print(f"{model.name}  {megabytes(model.bytes)}  SHA-256 {model.sha256}")
    say(f"headrace run {model.name} PROMPT" if is_new else "it was there already")
    return 0


def _list(args: argparse.Namespace) -> int:
    from headrace.runtime.commands.progress import megabytes

    found = _found()
    if args.json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
        return 0
    if not found:
        print("no models are kept; fetch one with headrace pull", file=sys.stderr)
    width = max((len(entry["name"]) for entry in found), default=0)
    for entry in found:
        size = megabytes(entry["bytes"])
        print(f"{entry['name']:{width}}  {size:>10}  {entry['kind']:10}  {entry['from']}")
    return 0


def _found() -> list[dict[str, Any]]:
    """What is kept, as plain data."""
    from headrace.runtime.store.models import folder_bytes, partial_models, stored_models
    from headrace.runtime.store.packages import cached_packages
    from headrace.runtime.store.places import models_folder

    found: list[dict[str, Any]] = [
        {
            "name": model.name,
            "kind": "model",
            "bytes": model.bytes,
            "from": model.address,
            "path": str(model.file),
            "sha256": model.sha256,
        }
        for model in stored_models()
    ]
    for name in partial_models():
        folder = models_folder() / f".{name}.partial"
        about = {"kind": "incomplete", "from": "pull goes on with it, rm removes it"}
        found.append({"name": name, "bytes": folder_bytes(folder), "path": str(folder), **about})
    for package, source in cached_packages():
        about = {"kind": "package", "from": f"made of {source}"}
        size = folder_bytes(package)
        found.append({"name": package.name, "bytes": size, "path": str(package), **about})
    return found


def _rm(args: argparse.Namespace) -> int:
    from headrace.runtime.commands.models import say
    from headrace.runtime.commands.progress import megabytes
    from headrace.runtime.store.models import remove

    for name in args.names:
        say(f"removed {name}, {megabytes(remove(name))}")
    return 0
