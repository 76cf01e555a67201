"""`headrace run --input FILE --output FILE`: many prompts decoded together."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.runtime.api import Runtime
from headrace.runtime.commands.answer_file import AnswerFile, answer_file, journal_of, read_lines
from headrace.runtime.commands.models import find_model, say
from headrace.runtime.commands.progress import progress_line
from headrace.runtime.commands.run import messages, uses_raw_text, with_limit
from headrace.runtime.completion import Completion
from headrace.runtime.config import GenerationConfig, merge
from headrace.runtime.errors import (
    BackendError,
    ConfigError,
    EngineClosedError,
    RequestError,
)
from headrace.runtime.manifest import MANIFEST_FILE, file_sha256

_ROUNDS = 2  # as many prompts are under way as have slots, times this


@dataclass(frozen=True, slots=True)
class Question:
    """A line of the input: what to answer, and how."""

    prompt: Any  # text or messages
    is_raw: bool
    config: GenerationConfig
    custom_id: str | None


def run_many(
    args: argparse.Namespace, engine_options: dict[str, Any], sampling_options: dict[str, Any]
) -> int:
    """Answer the lines of `args.input` into `args.output`; 1 where some of them failed.

    Raises:
        HeadraceError: whatever is wrong with the package, a file or an option.
        OSError: a file cannot be read or written.
    """
    numbers = [number for number, _ in read_lines(args.input)]
    model = find_model(args.model, args.preset)
    raw = uses_raw_text(args, model.package)
    identity = {
        "input_sha256": file_sha256(args.input),
        "model_sha256": file_sha256(model.package / MANIFEST_FILE),
        "options": {key: str(value) for key, value in sorted(sampling_options.items())},
        "raw": raw,
        "system": args.system,
    }
    with answer_file(args.output, max(numbers, default=0), identity) as answers:
        if answers.num_done:
            say(f"{answers.num_done} of {len(numbers)} answers are there")
        with Runtime.load(model.package, args.device, **engine_options) as runtime:
            defaults = merge(runtime.default_config, with_limit(runtime, sampling_options))
            work = _Work(runtime, answers, defaults, raw, args.system, len(numbers))
            try:
                asyncio.run(work.run(read_lines(args.input)))
            except KeyboardInterrupt:
                say(
                    f"interrupted; {answers.num_done} of {len(numbers)} answers are in "
                    f"{journal_of(args.output)}, and the same command goes on"
                )
                raise
        answers.finish()
    say(
        f"{len(numbers) - answers.num_failed} of {len(numbers)} lines are answered in {args.output}"
    )
    for number, reason in answers.failures:
        say(f"line {number} failed: {reason}")
    if answers.num_failed > len(answers.failures):
        say(f'{answers.num_failed} lines failed; they have an "error" in {args.output}')
    return 1 if answers.num_failed else 0


def parse_line(
    line: bytes | None, defaults: GenerationConfig, raw: bool, system: str | None
) -> Question:
    """What a line asks.

    Args:
        line: None for one that was too long to read.
        raw: texts go to the model as they are.

    Raises:
        RequestError: it is no JSON object with `prompt` or `messages`.
        ConfigError: one of its options is wrong.
    """
    if line is None:
        raise RequestError("the line is too long")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the line is not JSON: {error}") from None
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        raise RequestError('the line is not a JSON object with either "prompt" or "messages"')
    options = dict(value)
    prompt, talk = options.pop("prompt", None), options.pop("messages", None)
    custom_id = options.pop("custom_id", None)
    if custom_id is not None and not isinstance(custom_id, str):
        raise RequestError('"custom_id" is not a text')
    config = merge(defaults, options)
    if talk is not None:
        return Question(talk, False, config, custom_id)
    if not isinstance(prompt, str):
        raise RequestError('"prompt" is not a text')
    return Question(prompt if raw else messages(system, prompt), raw, config, custom_id)


class _Work:
    """Lines on their way to answers: a bounded number of them at a time."""

    def __init__(
        self,
        runtime: Runtime,
        answers: AnswerFile,
        defaults: GenerationConfig,
        raw: bool,
        system: str | None,
        num_lines: int,
    ) -> None:
        self._runtime, self._answers, self._num_lines = runtime, answers, num_lines
        self._defaults, self._raw, self._system = defaults, raw, system

    async def run(self, lines: Iterator[tuple[int, bytes | None]]) -> None:
        limit = _ROUNDS * self._runtime.capabilities.max_slots
        tasks: set[asyncio.Task[None]] = set()
        with progress_line("answering") as progress:
            for number, line in lines:
                if self._answers.has(number):
                    continue
                tasks.add(asyncio.create_task(self._answer(number, line)))
                if len(tasks) >= limit:
                    tasks = await _some(tasks)
                progress(self._answers.num_done, self._num_lines)
            while tasks:
                tasks = await _some(tasks)
                progress(self._answers.num_done, self._num_lines)

    async def _answer(self, number: int, line: bytes | None) -> None:
        record: dict[str, Any] = {}
        try:
            question = parse_line(line, self._defaults, self._raw, self._system)
            if question.custom_id is not None:
                record["custom_id"] = question.custom_id
            answer = self._runtime.agenerate if question.is_raw else self._runtime.achat
            record |= _record(await answer(question.prompt, question.config))
        except (BackendError, EngineClosedError):
            raise  # not of this line's making
        except Exception as error:  # a request fails alone, whatever went wrong in it
            kind = type(error).__name__ if not isinstance(error, RequestError | ConfigError) else ""
            record["error"] = f"{kind}: {error}" if kind else str(error)
        self._answers.add(number, record)


async def _some(tasks: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Wait for one of them; those that go on. Raises what one of the others raised."""
    done, going_on = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    return going_on


def _record(completion: Completion) -> Mapping[str, Any]:
    """An answer as plain data; all of them where there are several to a prompt."""
    choices = [
        {"text": choice.text, "finish_reason": choice.finish_reason.value}
        for choice in completion.choices
    ]
    counts = {
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.completion_tokens,
    }
    return {**(choices[0] if len(choices) == 1 else {"choices": choices}), **counts}
