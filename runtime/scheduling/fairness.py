"""What the scheduler decides by: who is served first, and the size of prompt chunks.

Order only: whether a sequence fits is the scheduler's business, so this can change who is served
when, but never what anybody gets.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.runtime.core import Sequence

QUANTUM_STEPS = 256  # steps waited or served that make one level of priority
MIN_CHUNK_TOKENS = 16  # prompts get on by this much a step however slow the machine is
_STEP_TOKENS = 16  # budgets are multiples of it: backends keep what they prepared for a shape
_DECAY = 0.7  # weight of the past against the newest step


class Fairness:
    """Levels: a sequence's priority, one up for each quantum of steps that it has waited, one down
    for each that it was served (multi-level feedback: who asks for little is served soon, and
    nobody waits for ever).

    A waiting sequence may interrupt a running one of a lower level. It then waits its turn again,
    with all its tokens.
    """

    def __init__(self, quantum_steps: int = QUANTUM_STEPS) -> None:
        self.quantum_steps = quantum_steps

    def level(self, sequence: Sequence, step_id: int) -> int:
        """`step_id` is of the step to be planned."""
        waited, served = sequence.waited_steps, sequence.served_steps
        if sequence.slot is None:
            waited += step_id - sequence.since_step
        else:
            served += step_id - sequence.since_step
        return sequence.priority + waited // self.quantum_steps - served // self.quantum_steps

    def order(self, waiting: Iterable[Sequence], step_id: int) -> list[Sequence]:
        """In the order of admission: by level, then by arrival.

        The first that does not fit keeps those behind it waiting.
        """
        return sorted(waiting, key=lambda s: (-self.level(s, step_id), s.seq_id))

    def victim(self, running: Iterable[Sequence], over: Sequence, step_id: int) -> Sequence | None:
        """Whom a waiting sequence may interrupt: the lowest level, then the last to arrive."""
        key = lambda s: (self.level(s, step_id), -s.seq_id)  # noqa: E731
        lowest = min(running, key=key, default=None)
        if lowest is None or self.level(lowest, step_id) >= self.level(over, step_id):
            return None
        return lowest


class ChunkBudget:
    """How many prompt tokens a step may hold, learned from the steps before.

    A step of decode rows takes `decode_ms`; prompt tokens add `token_ms` each, weighted by how
    many there were, so that short prompts with their fixed costs say little. While somebody
    decodes, the budget is what fits `inter_token_bound_ms`.

    Args:
        bound_ms: time that prompts may add to a step of which others wait for a token.
        max_tokens: budget when nobody decodes.
    """

    def __init__(self, bound_ms: float, max_tokens: int) -> None:
        self.bound_ms, self.max_tokens = bound_ms, max_tokens
        self._decode_ms = 0.0
        self._prompt_ms = 0.0
        self._prompt_tokens = 0.0

    @property
    def token_ms(self) -> float | None:
        """Estimated time that one more prompt token adds; None before the first prompt."""
        return self._prompt_ms / self._prompt_tokens if self._prompt_tokens else None

    def observe(self, decode_rows: int, prompt_tokens: int, model_ms: float) -> None:
        """Learn from a step."""
        if prompt_tokens:
            added_ms = max(0.0, model_ms - self._decode_ms) if decode_rows else model_ms
            self._prompt_ms = self._prompt_ms * _DECAY + added_ms
            self._prompt_tokens = self._prompt_tokens * _DECAY + prompt_tokens
        elif self._decode_ms:
            self._decode_ms += (1 - _DECAY) * (model_ms - self._decode_ms)
        else:
            self._decode_ms = model_ms

    def tokens(self, decode_rows: int) -> int:
        """Budget of a step that also has `decode_rows`."""
        if not decode_rows:
            return self.max_tokens
        token_ms = self.token_ms
        if token_ms is None:
            return min(MIN_CHUNK_TOKENS, self.max_tokens)
        fitting = self.bound_ms / max(token_ms, 1e-6)
        if fitting >= self.max_tokens:
            return self.max_tokens
        return min(
            max(int(fitting) // _STEP_TOKENS * _STEP_TOKENS, MIN_CHUNK_TOKENS), self.max_tokens
        )
