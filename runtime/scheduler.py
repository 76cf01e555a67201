"""Which tokens go into the next step. Pure Python, integers only.

Iteration-level batching: everybody who has one token to feed is in every step; longer stretches
(prompts) are cut into chunks within a token budget, oldest first. A sequence reserves all the KV
it may come to hold before it gets a slot, so nothing is ever thrown out again; who does not fit
waits, and those behind it too.

Sequences that continue one prompt (`n` > 1) are a family: its first member computes the prompt,
the others wait for that, copy it and feed only the last prompt token. If nobody has the prompt any
more (all ended or were cancelled), the next one computes it again.

The caller alternates `schedule` with `commit` (or `fail`); `add` and `cancel` may come at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.runtime.batching import BatchPolicy, ChunkBudget, FifoPolicy
from headrace.runtime.core import (
    FinishReason,
    KvCopy,
    KvOp,
    KvRelease,
    Row,
    Sequence,
    SequenceState,
    StepPlan,
    StepResult,
)
from headrace.runtime.drafting.drafter import Drafter
from headrace.runtime.errors import InsufficientMemoryError, PromptTooLongError
from headrace.runtime.slots import SlotPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a backend and a configuration leave room for.

    Attributes:
        max_slots: sequences in flight.
        context_tokens: longest sequence, prompt and answer.
        kv_budget_tokens: tokens of KV over all slots.
        kv_bytes_per_token: for messages.
        max_chunk_tokens: most prompt tokens in a step.
        inter_token_bound_ms: time that prompts may add to a step while others decode.
    """

    max_slots: int
    context_tokens: int
    kv_budget_tokens: int
    kv_bytes_per_token: int
    max_chunk_tokens: int
    inter_token_bound_ms: float

    def new_tokens(self, prompt_len: int, wanted: int | None) -> int:
        """How many tokens a sequence may generate: `wanted` within the context; None fills it.

        Raises:
            PromptTooLongError: the context has no room for one.
            InsufficientMemoryError: the KV budget could never hold prompt and answer.
        """
        room = self.context_tokens - prompt_len
        if room < 1:
            raise PromptTooLongError(prompt_len, self.context_tokens)
        if wanted is None:
            granted = max(1, min(room, self.kv_budget_tokens - prompt_len))
        else:
            granted = min(wanted, room)
        if prompt_len + granted > self.kv_budget_tokens:
            raise InsufficientMemoryError(
                (prompt_len + granted) * self.kv_bytes_per_token,
                self.kv_budget_tokens * self.kv_bytes_per_token,
                f"a prompt of {prompt_len} tokens and {granted} new ones exceed the KV cache; "
                "lower max_new_tokens or raise kv_budget_bytes",
            )
        return granted


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
        policy: BatchPolicy | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.limits = limits
        self._drafter = drafter
        self._policy = policy or FifoPolicy()
        self._budget = ChunkBudget(limits.inter_token_bound_ms, limits.max_chunk_tokens)
        self._pool = SlotPool(limits.max_slots, limits.kv_budget_tokens)
        self._waiting: dict[int, Sequence] = {}  # in order of arrival
        self._running: dict[int, Sequence] = {}  # in order of admission
        self._by_slot: list[Sequence] = []  # the running ones, ascending
        self._releases: list[KvOp] = []  # for the next plan
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
        return bool(self._waiting or self._running or self._releases)

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
        self._waiting[sequence.seq_id] = sequence

    def cancel(self, seq_id: int) -> bool:
        """End a sequence now; what a step in flight says about it is dropped.

        Returns:
            False where it had ended already.
        """
        if sequence := self._waiting.pop(seq_id, None):
            sequence.state = SequenceState.FINISHED
            sequence.finish_reason = FinishReason.CANCELLED
        elif sequence := self._running.get(seq_id):
            self._finish(sequence, FinishReason.CANCELLED)
        return sequence is not None

    def schedule(self) -> StepPlan | None:
        """The next step, or None where there is nothing to do."""
        assert self._in_flight is None, "commit the step in flight first"
        copies = self._admit() if self._waiting and self._pool.num_free else []
        decoding = [s for s in self._by_slot if len(s.tokens) - s.cached_len == 1]
        rows = self._decode_rows(decoding)
        decode_rows, prompt_tokens = len(rows), 0
        if decode_rows < len(self._by_slot):
            prompt_tokens = self._add_chunks(rows, self._budget.tokens(decode_rows))
        if not (rows or copies or self._releases):
            return None
        plan = StepPlan(self._next_step_id, tuple(rows), (*self._releases, *copies))
        self._releases = []
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
        self._releases += [op for op in plan.kv_ops if isinstance(op, KvRelease)]
        failed = list(self._running.values())
        for sequence in failed:
            self._finish(sequence, FinishReason.ERROR)
        self._releases = list(dict.fromkeys(self._releases))
        return failed

    def check_integrity(self) -> None:
        """Assert every invariant between steps."""
        self._pool.check_integrity()
        running = list(self._running.values())
        assert self._by_slot == sorted(running, key=_slot)
        assert self._pool.num_free == self.limits.max_slots - len(running)
        assert self._pool.reserved_tokens == sum(s.reserved_len for s in running)
        for table, state in (
            (self._waiting, SequenceState.WAITING),
            (self._running, SequenceState.RUNNING),
        ):
            _check_table(table, state)
        for sequence in running:
            assert sequence.slot is not None and self._pool.owner(sequence.slot) == sequence.seq_id
            assert sequence.cached_len < len(sequence.tokens) <= sequence.reserved_len

    def _admit(self) -> list[KvOp]:
        """Give slots to waiting sequences in the policy's order; the copies that this takes."""
        copies: list[KvOp] = []
        admitted: list[Sequence] = []
        sources = self._prefix_sources()
        for sequence in self._policy.order(self._waiting.values()):
            prefix_len = sequence.prompt_len - 1
            source = None if sequence.prefix_of is None else sources.get(sequence.prefix_of)
            if source is not None and source.cached_len < prefix_len:
                continue  # its prompt is being computed; those behind it need not wait for that
            if not self._pool.fits(sequence.reserved_len):
                break
            slot = self._pool.acquire(sequence.seq_id, sequence.reserved_len)
            if source is not None and prefix_len:
                assert source.slot is not None
                copies.append(KvCopy(source.slot, slot, prefix_len))
                sequence.cached_len = prefix_len
            sequence.slot, sequence.state = slot, SequenceState.RUNNING
            sources.setdefault(_family(sequence), sequence)
            admitted.append(sequence)
        for sequence in admitted:
            del self._waiting[sequence.seq_id]
            self._running[sequence.seq_id] = sequence
        if admitted:
            self._by_slot = sorted(self._running.values(), key=_slot)
        return copies

    def _prefix_sources(self) -> dict[int, Sequence]:
        """Of each family, the running member that has most of the prompt cached."""
        sources: dict[int, Sequence] = {}
        for sequence in self._running.values():
            best = sources.setdefault(_family(sequence), sequence)
            if sequence.cached_len > best.cached_len:
                sources[_family(sequence)] = sequence
        return sources

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
        slot = sequence.slot
        assert slot is not None
        if self._drafter is not None:
            self._drafter.forget(sequence.seq_id)
        del self._running[sequence.seq_id]
        self._by_slot.remove(sequence)
        self._pool.release(slot)
        self._releases.append(KvRelease(slot))
        sequence.slot, sequence.state = None, SequenceState.FINISHED
        sequence.finish_reason = reason


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None
    return sequence.slot


def _family(sequence: Sequence) -> int:
    """Id of the sequence whose prompt this one continues: its own unless it is a sibling."""
    return sequence.seq_id if sequence.prefix_of is None else sequence.prefix_of


def _check_table(table: Mapping[int, Sequence], state: SequenceState) -> None:
    for seq_id, sequence in table.items():
        assert sequence.seq_id == seq_id and sequence.state is state
        sequence.check()
