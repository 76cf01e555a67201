"""Which tokens go into the next step. Pure Python, integers only.

Iteration-level batching: everybody who has one token to feed is in every step; longer stretches
(prompts) are cut into chunks within a token budget, oldest first. A sequence reserves all the KV
it may come to hold before it gets a slot. Who does not fit waits, and those behind it too, unless
one of a lower level runs: that one is interrupted and computes, or finds in the prefix cache, what
it had when its turn comes again.

A prompt that begins like a text whose KV is still there, or is being computed, shares that
(`prefix_cache.py`): chat turns, system prompts, the siblings of `n` > 1.

The caller alternates `schedule` with `commit` (or `fail`); `add`, `cancel` and `end` may come at
any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.runtime.core import (
    FinishReason,
    KvCopy,
    KvOp,
    KvRead,
    KvRelease,
    KvWrite,
    Row,
    Sequence,
    SequenceState,
    StepPlan,
    StepResult,
)
from headrace.runtime.drafting.drafter import Drafter
from headrace.runtime.scheduling.fairness import ChunkBudget, Fairness
from headrace.runtime.scheduling.limits import Limits
from headrace.runtime.scheduling.prefix_cache import Placement, Prefix, PrefixCache
from headrace.runtime.scheduling.slots import SlotPool


@dataclass(frozen=True, slots=True)
class _InFlight:
    plan: StepPlan
    decode_rows: int
    prompt_tokens: int


class Scheduler:
    """Owns the sequences between `add` and their end."""

    def __init__(
        self,
        limits: Limits,
        fairness: Fairness | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.limits = limits
        self._drafter = drafter
        self._fairness = fairness or Fairness()
        self._budget = ChunkBudget(limits.inter_token_bound_ms, limits.max_chunk_tokens)
        self._pool = SlotPool(limits.max_slots, limits.kv_budget_tokens)
        self._prefixes = PrefixCache(self._pool, limits.prefix_cache_tokens)
        self._waiting: dict[int, Sequence] = {}
        self._running: dict[int, Sequence] = {}  # in order of admission
        self._by_slot: list[Sequence] = []  # the running ones, ascending
        self._kv_ops: list[KvOp] = []  # for the next plan
        self._in_flight: _InFlight | None = None
        self._next_step_id = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_free_slots(self) -> int:
        return self._pool.num_free

    @property
    def has_work(self) -> bool:
        """Whether `schedule` would have something to do."""
        return bool(self._waiting or self._running or self._kv_ops)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; its `max_new_tokens` is cut to what the context holds.

        Raises:
            PromptTooLongError, InsufficientMemoryError: it could never be served.
        """
        assert sequence.state is SequenceState.WAITING
        assert sequence.seq_id not in self._waiting and sequence.seq_id not in self._running
        sequence.max_new_tokens = self.limits.new_tokens(
            sequence.prompt_len, sequence.max_new_tokens
        )
        sequence.check()
        sequence.since_step = self._next_step_id
        self._waiting[sequence.seq_id] = sequence

    def cancel(self, seq_id: int) -> bool:
        """`end`, because nobody wants more of it."""
        return self.end(seq_id, FinishReason.CANCELLED)

    def end(self, seq_id: int, reason: FinishReason) -> bool:
        """End a sequence now; what a step in flight says about it is dropped.

        Returns:
            False where it had ended already.
        """
        if sequence := self._waiting.pop(seq_id, None):
            self._forget_drafts(sequence)
            sequence.state, sequence.finish_reason = SequenceState.FINISHED, reason
        elif sequence := self._running.get(seq_id):
            self._finish(sequence, reason)
        return sequence is not None

    def schedule(self) -> StepPlan | None:
        """The next step, or None where there is nothing to do."""
        assert self._in_flight is None, "commit the step in flight first"
        if self._waiting:
            self._admit()
        decoding = [s for s in self._by_slot if len(s.tokens) - s.cached_len == 1]
        rows = self._decode_rows(decoding)
        decode_rows, prompt_tokens = len(rows), 0
        if decode_rows < len(self._by_slot):
            prompt_tokens = self._add_chunks(rows, self._budget.tokens(decode_rows))
        if not (rows or self._kv_ops):
            return None
        plan = StepPlan(self._next_step_id, tuple(rows), tuple(self._kv_ops))
        self._kv_ops = []
        self._next_step_id += 1
        self._in_flight = _InFlight(plan, decode_rows, prompt_tokens)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[Sequence]:
        """Take over what a step came to; returns the sequences that it ended."""
        step = self._in_flight
        assert step is not None and step.plan is plan and result.step_id == plan.step_id
        self._in_flight = None
        if plan.rows:
            self._budget.observe(step.decode_rows, step.prompt_tokens, result.model_ms)
            if self._drafter is not None and not step.prompt_tokens:
                self._drafter.observe_step(plan.num_tokens, result.model_ms)
        finished: list[Sequence] = []
        for row, outcome in zip(plan.rows, result.rows, strict=True):
            assert row.seq_id == outcome.seq_id
            sequence = self._running.get(row.seq_id)
            if sequence is None:  # cancelled meanwhile
                continue
            sampled = outcome.sampled
            if self._drafter is not None and outcome.finish is None:
                self._drafter.observe(sequence.seq_id, row.num_logits - 1, sampled)
            # The last `num_logits` tokens of a row count as far as what follows them was sampled.
            sequence.cached_len = row.past_len + len(row.tokens) - row.num_logits + len(sampled)
            for token in sampled:
                sequence.tokens.append(token.token_id)
            finish = outcome.finish
            if finish is None and sequence.generated_len >= sequence.max_new_tokens:
                finish = FinishReason.LENGTH
            if finish is not None:
                self._finish(sequence, finish)
                finished.append(sequence)
        return finished

    def fail(self, plan: StepPlan) -> list[Sequence]:
        """The step did not happen: everything that runs ends with ERROR; the waiting stay."""
        assert self._in_flight is not None and self._in_flight.plan is plan
        self._in_flight = None
        self._kv_ops += [op for op in plan.kv_ops if isinstance(op, KvRelease)]
        for op in plan.kv_ops:
            if isinstance(op, KvCopy | KvWrite):
                target = op.target if isinstance(op, KvCopy) else op.slot
                self._kv_ops += self._prefixes.distrust(target)
        failed = list(self._running.values())
        for sequence in failed:
            self._finish(sequence, FinishReason.ERROR)
        self._kv_ops = list(dict.fromkeys(self._kv_ops))
        return failed

    def restart(self) -> list[Sequence]:
        """The backend has lost all keys and values, and the step in flight did not happen: whoever
        ran waits with its tokens until they are computed again; returns those."""
        self._in_flight = None
        self._kv_ops = []
        interrupted = list(self._running.values())
        for sequence in interrupted:
            sequence.cached_len = 0
            self._interrupt(sequence)
        self._prefixes.forget_all()
        self._kv_ops = []  # the slots are empty
        return interrupted

    def read_kv(self, text: list[int]) -> KvRead | None:
        """Ask for the keys and values of as much of a text as is there, in the next step; None
        where nothing is."""
        found = self._prefixes.find(text, self._cached_len)
        if found.slot is None:
            return None
        op = KvRead(found.slot, found.num_tokens)
        self._kv_ops.append(op)
        return op

    def write_kv(self, text: list[int], data: bytes) -> KvWrite | None:
        """Keep a text whose keys and values were read before; None where there is no room."""
        ops = self._prefixes.restore(text, data)
        self._kv_ops += ops
        return next((op for op in ops if isinstance(op, KvWrite)), None)

    def check_integrity(self) -> None:
        """Assert every invariant between steps."""
        self._pool.check_integrity()
        running = list(self._running.values())
        assert self._by_slot == sorted(running, key=_slot)
        assert self._pool.num_free == self.limits.max_slots - len(running)
        assert self._pool.owned_tokens == sum(s.reserved_len for s in running)
        self._prefixes.check_integrity()
        for table, state in (
            (self._waiting, SequenceState.WAITING),
            (self._running, SequenceState.RUNNING),
        ):
            _check_table(table, state)
        for sequence in running:
            assert sequence.slot is not None and self._pool.owner(sequence.slot) == sequence.seq_id
            assert sequence.cached_len < len(sequence.tokens) <= sequence.reserved_len

    def _admit(self) -> None:
        """Give slots to waiting sequences in order, with what is there of their texts."""
        step_id, admitted = self._next_step_id, False
        for sequence in self._fairness.order(self._waiting.values(), step_id):
            text = sequence.tokens[:-1]  # the last token's logits are wanted
            prefix = self._prefixes.find(text, self._cached_len)
            if prefix.worth_waiting:
                continue  # those behind it need not wait for that
            while (placed := self._place(sequence, text, prefix)) is None:
                victim = self._fairness.victim(self._running.values(), sequence, step_id)
                if victim is None:
                    break
                self._interrupt(victim)
                # What was found may have had to go.
                prefix = self._prefixes.find(text, self._cached_len)
            if placed is None:
                break
            self._kv_ops += placed.ops
            sequence.slot, sequence.cached_len = placed.slot, placed.cached_len
            if not sequence.served_steps:  # afterwards it finds what it computed itself
                sequence.found_len = placed.cached_len
            sequence.state = SequenceState.RUNNING
            sequence.waited_steps += step_id - sequence.since_step
            sequence.since_step = step_id
            del self._waiting[sequence.seq_id]
            self._running[sequence.seq_id] = sequence
            admitted = True
        if admitted:
            self._by_slot = sorted(self._running.values(), key=_slot)

    def _place(self, sequence: Sequence, text: list[int], prefix: Prefix) -> Placement | None:
        return self._prefixes.place(sequence.seq_id, text, sequence.reserved_len, prefix)

    def _interrupt(self, sequence: Sequence) -> None:
        """Back to the waiting ones; its KV is kept as long as nobody needs the room."""
        self._give_up(sequence, sequence.tokens[: sequence.cached_len])
        sequence.state, sequence.cached_len = SequenceState.WAITING, 0
        sequence.served_steps += self._next_step_id - sequence.since_step
        sequence.since_step = self._next_step_id
        self._waiting[sequence.seq_id] = sequence

    def _cached_len(self, slot: int) -> int:
        owner = self._pool.owner(slot)
        assert owner is not None
        return self._running[owner].cached_len

    def _decode_rows(self, sequences: list[Sequence]) -> list[Row]:
        """The last token of each, and its drafts."""
        drafts = {} if self._drafter is None else self._drafter.propose(sequences)
        rows: list[Row] = []
        for sequence in sequences:
            assert sequence.slot is not None
            tokens = (sequence.tokens[-1], *drafts.get(sequence.seq_id, ()))
            rows.append(
                Row(
                    sequence.seq_id,
                    sequence.slot,
                    sequence.cached_len,
                    tokens,
                    len(tokens),
                    sequence.inverse_temperature,
                )
            )
        return rows

    def _add_chunks(self, rows: list[Row], budget_tokens: int) -> int:
        """Add prompt chunks, oldest sequence first; returns how many tokens they have."""
        left = budget_tokens
        for sequence in self._running.values():
            tokens, start = sequence.tokens, sequence.cached_len
            pending = len(tokens) - start
            if pending == 1:
                continue
            if not left:
                break
            end = start + min(pending, left)
            left -= end - start
            assert sequence.slot is not None
            num_logits = 1 if end == len(tokens) else 0
            chunk = tuple(tokens[start:end])
            rows.append(
                Row(
                    sequence.seq_id,
                    sequence.slot,
                    start,
                    chunk,
                    num_logits,
                    sequence.inverse_temperature,
                )
            )
        rows.sort(key=lambda row: row.slot)
        return budget_tokens - left

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._forget_drafts(sequence)
        # What a failed step left in a slot is not known.
        held = sequence.tokens[: sequence.cached_len] if reason is not FinishReason.ERROR else []
        self._give_up(sequence, held)
        sequence.state, sequence.finish_reason = SequenceState.FINISHED, reason

    def _forget_drafts(self, sequence: Sequence) -> None:
        if self._drafter is not None:
            self._drafter.forget(sequence)

    def _give_up(self, sequence: Sequence, held: list[int]) -> None:
        """Take a sequence from the running ones and its slot from it."""
        assert sequence.slot is not None
        del self._running[sequence.seq_id]
        self._by_slot.remove(sequence)
        self._kv_ops += self._prefixes.give_up(sequence.slot, held)
        sequence.slot = None


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None
    return sequence.slot


def _check_table(table: Mapping[int, Sequence], state: SequenceState) -> None:
    for seq_id, sequence in table.items():
        assert sequence.seq_id == seq_id and sequence.state is state
        sequence.check()
