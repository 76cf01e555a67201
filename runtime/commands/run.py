"""`headrace run`: one prompt, its answer as it is written."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.runtime.api import Runtime
from headrace.runtime.commands.models import find_model, say
from headrace.runtime.completion import TokenDelta
from headrace.runtime.errors import ConfigError, RequestError
from headrace.runtime.grammar.matcher import load_llguidance
from headrace.runtime.grammar.spec import Grammar
from headrace.runtime.manifest import read_manifest
from headrace.runtime.text_files import read_text

DEFAULT_MAX_NEW_TOKENS = 512


def run(
    args: argparse.Namespace, engine_options: dict[str, Any], sampling_options: dict[str, Any]
) -> int:
    """Answer `args.prompt`; a package without a chat template is given the bare text.

    Raises:
        HeadraceError: whatever is wrong with the package, the prompt or an option.
    """
    prompt = read_prompt(args.prompt)
    model = find_model(args.model, args.preset)
    raw = uses_raw_text(args, model.package)
    with Runtime.load(
        model.package, args.device, **{**engine_options, "max_sequences": 1}
    ) as runtime:
        options = with_limit(runtime, sampling_options)
        start = time.perf_counter()
        deltas = (
            runtime.stream(prompt, **options)
            if raw
            else runtime.chat(messages(args.system, prompt), stream=True, **options)
        )
        times: list[float] = []
        stamped = _stamped(deltas, times)
        seen = list(stamped) if args.json else write_text(stamped)
        timing = speed(seen, [moment - start for moment in times])
        print(json.dumps(_summary(seen) | timing, ensure_ascii=False) if args.json else "")
        if model.is_new:
            say(in_words(timing))
    return 0


def check_prompts(args: argparse.Namespace) -> None:
    """Raises ConfigError: not one of a prompt and a file of them, or no place for answers."""
    if (args.prompt is None) == (args.input is None):
        raise ConfigError("PROMPT", args.prompt, "a prompt, or --input FILE with --output FILE")
    if (args.input is None) != (args.output is None):
        raise ConfigError("--output", None, "--input FILE and --output FILE together")
    if args.input is not None and args.json:
        raise ConfigError("--json", True, "a single prompt; --output is JSON as it is")


def uses_raw_text(args: argparse.Namespace, package: Path) -> bool:
    """Whether prompts go to the model as they are, without a chat template.

    Raises:
        ConfigError: and a system message has no place.
    """
    raw = args.raw or read_manifest(package).tokenizer.chat_template is None
    if raw and args.system is not None:
        raise ConfigError("--system", args.system, "no system message where no template is used")
    return bool(raw)


def grammar_option(args: argparse.Namespace) -> dict[str, Any]:
    """The field of `GenerationConfig` for the form of the answer, where one was asked for.

    Raises:
        ConfigError: a file cannot be read, it is no grammar, or llguidance is not installed.
    """
    if args.json_schema is not None:
        grammar = Grammar.json_schema(read_text(args.json_schema, "--json-schema"))
    elif args.regex is not None:
        grammar = Grammar.regex(args.regex)
    elif args.grammar is not None:
        grammar = Grammar.lark(read_text(args.grammar, "--grammar"))
    else:
        return {}
    load_llguidance()  # rather than after a model was loaded
    return {"grammar": grammar}


def with_limit(runtime: Runtime, options: dict[str, Any]) -> dict[str, Any]:
    """`options`, with a length where neither they nor the package give one.

    A small model may repeat itself to the end of its context, which takes minutes.
    """
    if runtime.default_config.max_new_tokens is not None:
        return options
    return {"max_new_tokens": DEFAULT_MAX_NEW_TOKENS, **options}


def read_prompt(prompt: str) -> str:
    """The prompt itself or, for "-", standard input without its last line end.

    Raises:
        RequestError: standard input is not UTF-8.
    """
    if prompt != "-":
        return prompt
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8 text: {error}") from None
    return text.removesuffix("\n").removesuffix("\r")


def messages(system: str | None, prompt: str) -> list[dict[str, str]]:
    """A conversation that begins."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": prompt}]


def write_text(deltas: Iterator[TokenDelta]) -> list[TokenDelta]:
    """Print each piece at once; returns all of them."""
    seen = []
    for delta in deltas:
        seen.append(delta)
        if delta.text:
            print(delta.text, end="", flush=True)
    return seen


def _stamped(deltas: Iterator[TokenDelta], times: list[float]) -> Iterator[TokenDelta]:
    """The same pieces; `times` takes the moment of each."""
    for delta in deltas:
        times.append(time.perf_counter())
        yield delta


def _summary(seen: list[TokenDelta]) -> dict[str, Any]:
    """The whole answer."""
    last = seen[-1]
    return {
        "text": "".join(delta.text for delta in seen),
        "token_ids": [token for delta in seen for token in delta.token_ids],
        "entropy_nats": [value for delta in seen for value in delta.entropy_nats],
        "finish_reason": last.finish_reason and last.finish_reason.value,
        "matched_stop": last.matched_stop,
    }


def speed(seen: list[TokenDelta], times_s: list[float]) -> dict[str, Any]:
    """How fast the answer was, given when its pieces came after it was asked for."""
    num_tokens = sum(len(delta.token_ids) for delta in seen)
    first, last = times_s[0], times_s[-1]
    return {
        "completion_tokens": num_tokens,
        "first_token_s": first,
        "decode_tok_s": (num_tokens - 1) / (last - first) if last > first else None,
    }


def in_words(timing: dict[str, Any]) -> str:
    """What `speed` found, for people."""
    rate = timing["decode_tok_s"]
    then = "" if rate is None else f", then {rate:.1f} tokens/s"
    first = f"the first after {timing['first_token_s']:.2f} s"
    return f"{timing['completion_tokens']} tokens, {first}{then}"
