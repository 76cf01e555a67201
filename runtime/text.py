"""Text of an answer while its tokens come in.

`TextStream` never emits half a character and never a part of a stop string. What it emits does not
depend on how the tokens were grouped: joined, it is the text of all tokens, cut at the first stop.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from headrace.runtime.chat.tool_calls import ToolCall, ToolCallParser, ToolFormat


class StopMatcher:
    """Finds stop strings in a text that comes in pieces (Aho and Corasick, 1975).

    The match that ends first counts; of those that end at the same place, the longest. A state is
    the longest end of the text so far that begins a stop string: what has to be withheld.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        assert all(stop)
        self._next: list[dict[str, int]] = [{}]  # by state: what it goes on with, and to where
        self._fallback = [0]  # by state: the next shorter end that begins a stop string
        self._depth = [0]  # by state: its length in characters
        self._match: list[str | None] = [None]  # by state: the longest stop string that ends here
        for string in stop:
            self._add(string)
        self._link()
        self._state = 0
        self._withheld = ""
        self.matched: str | None = None

    def _add(self, string: str) -> None:
        state = 0
        for depth, character in enumerate(string, 1):
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self._depth.append(depth)
                self._match.append(None)
            state = self._next[state][character]
        self._match[state] = string

    def _link(self) -> None:
        """Set fallbacks breadth first: a state's own is shorter, so it is done before."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            fallback = self._fallback[state]
            self._match[state] = self._match[state] or self._match[fallback]
            for character, child in self._next[state].items():
                queue.append(child)
                self._fallback[child] = self._step(fallback, character)

    def _step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)

    def push(self, text: str) -> str:
        """Take more text; returns what is now known to be before any stop string."""
        if self.matched is not None:
            return ""
        state = self._state
        for position, character in enumerate(text, 1):
            state = self._step(state, character)
            if (stop := self._match[state]) is not None:
                self.matched = stop
                before = self._withheld + text[:position]
                self._withheld = ""
                return before[: -len(stop)]
        self._state = state
        text = self._withheld + text
        safe = len(text) - self._depth[state]
        self._withheld = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """The text still withheld, now that no more comes."""
        rest, self._withheld = self._withheld, ""
        return rest


class TokenTexts(Protocol):
    """What is needed of `runtime.tokenizer.Tokenizer`."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def special_marks(self, texts: Iterable[str]) -> dict[int, bytes]: ...


class TextStream:
    """Turns the tokens of one answer into text as they come, and into calls of tools.

    Push every token of the answer but the one that ended it (a stop token is no text). Special
    tokens are not shown.

    Args:
        stop: strings that end the answer, none of them empty.
        include_stop: whether a matched stop string is part of the text.
        tools: how calls of tools are written; None looks for none.
        opening: the beginning of a call that the prompt ended with.

    Attributes:
        stopped: the stop string that was matched, or None.
    """

    def __init__(
        self,
        tokenizer: TokenTexts,
        stop: Sequence[str],
        include_stop: bool,
        tools: ToolFormat | None = None,
        opening: str = "",
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._matcher = StopMatcher(stop) if stop else None
        self._include_stop = include_stop
        self._marks = {} if tools is None else tokenizer.special_marks(tools.marks)
        self._parser = None if tools is None else ToolCallParser(tools)
        if self._parser is not None:
            self._parser.push(opening)
        self.stopped: str | None = None

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that these tokens make certain: possibly none. Nothing follows a stop string."""
        if self.stopped is not None:
            return ""
        data = b"".join([self._marks.get(i) or self._token_bytes(i) for i in token_ids])
        text = self._match(self._decoder.decode(data))
        return text if self._parser is None else self._parser.push(text)

    def finish(self) -> str:
        """What was held back: a character that never became whole (as U+FFFD), and the beginning
        of a stop string or of a call that never came."""
        text = ""
        if self.stopped is None:
            text = self._match(self._decoder.decode(b"", final=True))
            if self._matcher is not None:
                text += self._matcher.finish()
        return text if self._parser is None else self._parser.push(text) + self._parser.finish()

    def take_calls(self) -> tuple[ToolCall, ...]:
        """Calls found since this was last asked."""
        if self._parser is None or not self._parser.calls:
            return ()
        calls, self._parser.calls = tuple(self._parser.calls), []
        return calls

    def _match(self, text: str) -> str:
        if self._matcher is None:
            return text
        safe = self._matcher.push(text)
        self.stopped = self._matcher.matched
        return safe + self.stopped if self.stopped and self._include_stop else safe
