"""A smaller model that guesses what a larger one will write, with keys and values of its own.

Its slots have the numbers of the larger model's. What was guessed wrong is undone by a smaller
`past_len`, as in any step, and a text that begins like what its slot holds goes on from there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from headrace.backends.base import Backend, StepOutput
from headrace.runtime.core import KvOp, KvRelease, Row, Sequence, StepPlan
from headrace.runtime.drafting.model import Prediction, Wanted
from headrace.runtime.errors import HeadraceError

logger = logging.getLogger(__name__)

READ_TOKENS = 128  # most in a step, so that reading a long text does not hold up the others
# Of a sequence (its id), a position in it, and a line of the output: the token to guess there.
Choose = Callable[[int, int, StepOutput, int], int]

_WARM_UP_STEPS = 3  # the first ones take longer, and would give a wrong idea of the cost


class DraftModel:
    """See `drafting.model.Model`. If its backend fails it has no guesses any more, and that is all.

    Args:
        backend: not loaded yet; closed with the draft model.
        max_kv_tokens: of all slots together. What the larger model may hold is enough.
        choose: a guess from the model's output.

    Raises:
        whatever `backend.load` raises, and BackendError where it does not run.
    """

    def __init__(self, backend: Backend, max_kv_tokens: int, choose: Choose) -> None:
        self._backend, self._choose = backend, choose
        caps = self._caps = backend.load()
        self._max_kv_tokens = min(max_kv_tokens, caps.kv_budget_tokens)
        self._slots = [_Slot() for _ in range(caps.max_slots)]
        self._has_failed = False
        self._num_steps = 0
        for past_len in range(_WARM_UP_STEPS):
            self._run([Row(0, 0, past_len, (0,), 1)], [])
        self._run([], [KvRelease(0)])

    def rest(self) -> None:
        """Have the backend give back what it keeps for the next steps."""
        if self._has_failed:
            return
        try:
            self._run([], [])
        except HeadraceError as error:
            self._give_up(error)

    def close(self) -> None:
        self._has_failed = True
        self._backend.close()

    def unread_tokens(self, sequence: Sequence, num_guesses: int) -> int | None:
        """See `drafting.model.Model`."""
        slot, num_tokens = sequence.slot, len(sequence.tokens)
        if self._has_failed or slot is None or slot >= len(self._slots):
            return None
        if num_tokens + num_guesses > self._caps.context_tokens:
            return None
        return num_tokens - self._slots[slot].keep_common(sequence)

    def predict(self, wanted: list[Wanted]) -> tuple[list[Prediction | None], float]:
        """See `drafting.model.Model`."""
        found: list[Prediction | None] = [None] * len(wanted)
        order = sorted(range(len(wanted)), key=lambda i: _slot(wanted[i]))
        rows, left = [], READ_TOKENS
        for i in order:
            rows.append(self._row(wanted[i], max(left, 1)))
            left -= len(rows[-1].tokens)
        ops = self._make_room(sum(len(row.tokens) for row in rows))
        if ops is None:
            return found, 0.0
        try:
            output = self._run(rows, ops)
        except HeadraceError as error:
            self._give_up(error)
            return found, 0.0
        line = 0
        for i, row in zip(order, rows, strict=True):
            self._slots[row.slot].tokens += row.tokens
            if row.num_logits:
                position = row.past_len + len(row.tokens)
                token = self._choose(row.seq_id, position, output, line)
                found[i] = Prediction(token, float(output.entropy_nats[line]))
                line += 1
        return found, output.model_ms

    def _give_up(self, error: HeadraceError) -> None:
        logger.warning("the draft model failed and is not asked any more: %s", error)
        self._has_failed = True

    def _row(self, wanted: Wanted, max_tokens: int) -> Row:
        """What the model has not read of a sequence and its guesses, from the beginning."""
        tokens, past_len = wanted.sequence.tokens, len(self._slots[_slot(wanted)].tokens)
        unread = [*tokens[past_len:], *wanted.guesses[max(past_len - len(tokens), 0) :]]
        chunk = tuple(unread[: min(max_tokens, self._caps.max_row_tokens)])
        num_logits = 1 if len(chunk) == len(unread) else 0
        sequence, inverse = wanted.sequence, wanted.sequence.inverse_temperature
        return Row(sequence.seq_id, _slot(wanted), past_len, chunk, num_logits, inverse)

    def _make_room(self, num_tokens: int) -> list[KvOp] | None:
        """Release what nobody uses if room is short; None where that is not enough."""
        ops: list[KvOp] = []
        held = sum(len(slot.tokens) for slot in self._slots)
        for number, slot in enumerate(self._slots):
            if held + num_tokens <= self._max_kv_tokens:
                return ops
            if slot.tokens and (slot.owner is None or slot.owner.slot != number):
                held -= len(slot.tokens)
                slot.tokens.clear()
                slot.owner = None
                ops.append(KvRelease(number))
        return ops if held + num_tokens <= self._max_kv_tokens else None

    def _run(self, rows: list[Row], ops: list[KvOp]) -> StepOutput:
        self._num_steps += 1
        plan = StepPlan(self._num_steps, tuple(rows), tuple(ops))
        return self._backend.collect(self._backend.submit(plan))


class _Slot:
    """What a slot holds, and for whom.

    Attributes:
        tokens: whose keys and values are there.
        common_len: how many of them are known to be those of `owner`.
    """

    __slots__ = ("common_len", "owner", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.owner: Sequence | None = None
        self.common_len = 0

    def keep_common(self, sequence: Sequence) -> int:
        """Forget what the sequence does not begin with, and its last token; what is left."""
        if self.owner is not sequence:
            self.owner, self.common_len = sequence, 0
        held, tokens, i = self.tokens, sequence.tokens, self.common_len
        end = min(len(held), len(tokens) - 1)
        while i < end and held[i] == tokens[i]:
            i += 1
        del held[i:]
        self.common_len = i
        return i


def _slot(wanted: Wanted) -> int:
    slot = wanted.sequence.slot
    assert slot is not None
    return slot
