"""`headrace chat`: a conversation at the terminal.

Ctrl-C ends the answer, or the text that is being typed, and never the program; Ctrl-D ends it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.runtime.api import Runtime
from headrace.runtime.commands.models import find_model
from headrace.runtime.commands.run import in_words, messages, speed, with_limit
from headrace.runtime.commands.typed import line_editor, read_text
from headrace.runtime.completion import TokenDelta
from headrace.runtime.errors import RequestError
from headrace.runtime.prompts import is_conversation
from headrace.runtime.store.places import history_file

HELP = (
    "/reset forgets the conversation, /save FILE and /load FILE keep it, /stats tells about the "
    'last answer, /quit ends; """ begins and ends a text of several lines, Ctrl-C ends an answer'
)


def chat(
    args: argparse.Namespace, engine_options: dict[str, Any], sampling_options: dict[str, Any]
) -> int:
    """Read texts and answer them until the end of the input.

    Raises:
        HeadraceError: the package cannot be used or the device failed.
    """
    package = find_model(args.model, args.preset).package
    if sys.stdin.isatty():
        print(HELP, file=sys.stderr)
    with (
        line_editor(history_file()),
        Runtime.load(package, args.device, **{**engine_options, "max_sequences": 1}) as runtime,
    ):
        conversation = Conversation(runtime, args.system, with_limit(runtime, sampling_options))
        while True:
            try:
                text = read_text()
                if text is None or text.strip() == "/quit":
                    return 0
                _obey(conversation, text)
            except KeyboardInterrupt:
                print(file=sys.stderr)


def _obey(conversation: Conversation, text: str) -> None:
    """Carry out a command, or answer what is none."""
    command = text.strip()
    if command == "/reset":
        conversation.reset()
    elif command == "/stats":
        print(conversation.stats(), file=sys.stderr)
    elif command.startswith(("/save ", "/load ")):
        print(conversation.keep(*command.split(maxsplit=1)), file=sys.stderr)
    elif command.startswith("/") and " " not in command:
        print(HELP, file=sys.stderr)
    elif command:
        conversation.ask(text)


class Conversation:
    """What was said so far. `system`: system message or None; `options`: of `GenerationConfig`."""

    def __init__(self, runtime: Runtime, system: str | None, options: dict[str, Any]) -> None:
        self._runtime, self._system, self._options = runtime, system, options
        self._messages: list[Mapping[str, Any]] = []
        self._stats = "nothing was asked yet"

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._messages = []

    def keep(self, command: str, file: str) -> str:
        """`/save` or `/load`; what came of it, in one line."""
        try:
            if command == "/load":
                session = self._runtime.load_session(file)
                if not is_conversation(session.prompt):
                    return f"{file} is no conversation"
                self._messages = list(session.prompt)
                return f"{len(self._messages)} messages, {len(session.token_ids)} tokens are there"
            if not self._messages:
                return "nothing was said yet"
            tokens = self._runtime.save_session(file, self._messages)
            return f"saved {len(self._messages)} messages and what was computed of {tokens} tokens"
        except (RequestError, OSError) as error:
            return str(error)

    def stats(self) -> str:
        """About the last answer, in one line."""
        return self._stats

    def ask(self, text: str) -> None:
        """Answer on the standard output, as it is written.

        A turn that cannot be answered, too long for the context for instance, is taken back. An
        answer that was interrupted stays in the conversation as far as it came.
        """
        turn = messages(self._system if not self._messages else None, text)
        seen: list[TokenDelta] = []
        times_s: list[float] = []
        start = time.perf_counter()
        try:
            for delta in self._runtime.chat([*self._messages, *turn], stream=True, **self._options):
                seen.append(delta)
                times_s.append(time.perf_counter() - start)
                print(delta.text, end="", flush=True)
        except RequestError as error:
            print(f"{error}; /reset begins anew", file=sys.stderr)
            return
        except KeyboardInterrupt:
            self._take_in(turn, seen, times_s)
            print(" [interrupted]", end="", file=sys.stderr)
        else:
            self._take_in(turn, seen, times_s)  # before the line ends, which may wait
        print(flush=True)

    def _take_in(
        self, turn: Sequence[Mapping[str, Any]], seen: list[TokenDelta], times_s: list[float]
    ) -> None:
        if answer := "".join(delta.text for delta in seen):
            self._messages += [*turn, {"role": "assistant", "content": answer}]
        if seen:
            self._stats = _describe(seen, times_s, self._runtime)


def _describe(seen: list[TokenDelta], times_s: list[float], runtime: Runtime) -> str:
    caps = runtime.capabilities
    new = sum(len(delta.token_ids) for delta in seen)
    guessed = sum(delta.num_accepted for delta in seen)
    used = seen[-1].prompt_tokens + new
    return (
        f"{in_words(speed(seen, times_s))}; {guessed} of them guessed ahead; "
        f"{used} of {caps.context_tokens} tokens of context used; {caps.name}"
    )
