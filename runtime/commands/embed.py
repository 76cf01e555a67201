"""`headrace embed`: texts in, one JSON object with a vector out for each."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from headrace.runtime.commands.models import find_model
from headrace.runtime.encoder.embedder import Embedder, Embeddings
from headrace.runtime.errors import ConfigError, RequestError
from headrace.runtime.text_files import read_text


def embed(args: argparse.Namespace) -> int:
    """Run the command; see `cli._add_embed` for the arguments.

    Raises:
        ConfigError: no texts were given, or the input is no JSON lines file.
        HeadraceError: as `Embedder`.
    """
    texts = list(args.texts) if args.input is None else _read(args.input)
    if not texts or (args.texts and args.input is not None):
        raise ConfigError("TEXT", args.texts, "one or more texts, or --input FILE, not both")
    with Embedder.load(find_model(args.model).package, num_threads=args.threads) as embedder:
        try:
            found = embedder.embed_all(texts, truncate=args.truncate)
        except RequestError as error:
            if "truncate" in str(error):
                raise RequestError(f"{error} (--truncate)") from None
            raise
        with _output(args.output) as stream:
            _write(found, stream)
    cut = sum(count > found.max_tokens for count in found.num_tokens)
    if cut:
        print(
            f"headrace: {cut} of {len(texts)} texts were cut to {found.max_tokens} tokens",
            file=sys.stderr,
        )
    return 0


def _read(path: Path) -> list[str]:
    """Texts of a JSON lines file: a string a line, or an object with `text`."""
    texts = []
    for number, line in enumerate(read_text(path, "input").splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        text = value.get("text") if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise ConfigError(
                "input", str(path), f'a JSON string or {{"text": ...}} in line {number}'
            )
        texts.append(text)
    return texts


@contextlib.contextmanager
def _output(path: Path | None) -> Iterator[IO[str]]:
    if path is None:
        yield sys.stdout
        return
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        yield stream


def _write(found: Embeddings, stream: IO[str]) -> None:
    for index, (vector, count) in enumerate(zip(found.vectors, found.num_tokens, strict=True)):
        line = {
            "index": index,
            "num_tokens": count,
            "truncated": count > found.max_tokens,
            "embedding": [float(f"{value:.8g}") for value in vector],
        }
        stream.write(json.dumps(line) + "\n")
