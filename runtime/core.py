"""The values that flow through a step. Pure Python: no arrays, no device, no tokenizer.

    requests -> Scheduler.schedule() -> StepPlan -> Backend.submit/collect -> sampling
                      ^                                                          |
                      +------------------ Scheduler.commit(StepResult) <---------+

`Sequence` is the only mutable type here and holds all state of one request; everything else is
frozen, and what each row of each step makes anew is a tuple, which takes a third of the time to
make. Positions count tokens of a sequence from 0; its KV occupies positions [0, cached_len).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NamedTuple


class FinishReason(StrEnum):
    """Why a sequence ended; the values are those of OpenAI's API where it has one."""

    STOP = "stop"  # stop token or stop string
    LENGTH = "length"  # max_new_tokens, or the context is full
    CANCELLED = "cancelled"
    ERROR = "error"


class SequenceState(Enum):
    WAITING = "waiting"  # no KV slot yet
    RUNNING = "running"  # owns a KV slot
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """All scheduling state of one request.

    Attributes:
        seq_id: unique within an engine; rises in order of arrival.
        tokens: prompt and generated token ids, in order.
        prompt_len: how many of `tokens` came with the request.
        max_new_tokens: generated tokens at which the sequence ends with LENGTH.
        slot: KV slot while RUNNING.
        cached_len: leading tokens whose keys and values are in the slot.
        inverse_temperature: see `Row`.
        priority: higher ones are served first.
        since_step: first step of the present state, WAITING or RUNNING.
        waited_steps, served_steps: steps in these states before the present one.
        forced: tokens that must follow `tokens`, known beforehand; most often none.
        is_lossy: drafts may change its text, so that none may come from the texts of others.
        found_len: leading tokens of the prompt that needed no computing: they were in the cache.
    """

    seq_id: int
    tokens: list[int]
    prompt_len: int
    max_new_tokens: int
    state: SequenceState = SequenceState.WAITING
    slot: int | None = None
    cached_len: int = 0
    finish_reason: FinishReason | None = None
    inverse_temperature: float = 0.0
    priority: int = 0
    since_step: int = 0
    waited_steps: int = 0
    served_steps: int = 0
    forced: tuple[int, ...] = ()
    is_lossy: bool = False
    found_len: int = 0

    @property
    def generated_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def reserved_len(self) -> int:
        """Tokens of KV that this sequence may come to hold."""
        return self.prompt_len + self.max_new_tokens

    def check(self) -> None:
        """Assert our own invariant: 0 <= cached < tokens, a slot exactly while running."""
        assert 0 < self.prompt_len <= len(self.tokens)
        assert 0 <= self.cached_len <= len(self.tokens)
        assert (self.slot is not None) == (self.state is SequenceState.RUNNING)
        assert self.generated_len <= self.max_new_tokens


class Row(NamedTuple):
    """One sequence's part of a step.

    Attributes:
        seq_id: the sequence.
        slot: its KV slot.
        past_len: tokens already in the slot; the new ones are written from this position on.
            Passing less than was written before undoes what lies beyond (rejected drafts).
        tokens: new token ids, at least one: a prompt chunk, or the last token and its drafts.
        num_logits: logits wanted for the last `num_logits` of `tokens`; 0 for a prompt chunk
            that does not reach the end of the prompt.
        inverse_temperature: of the probabilities that sampling would like to have beside the
            logits; 0 where it does not need any.
    """

    seq_id: int
    slot: int
    past_len: int
    tokens: tuple[int, ...]
    num_logits: int
    inverse_temperature: float = 0.0

    @property
    def is_prompt(self) -> bool:
        """Whether this is a chunk of a prompt: an answer's row has logits behind every token."""
        return self.num_logits < len(self.tokens)

    @property
    def drafts(self) -> tuple[int, ...]:
        """The guesses among `tokens`: those behind the first that has logits."""
        return self.tokens[len(self.tokens) - self.num_logits + 1 :]


@dataclass(frozen=True, slots=True)
class KvCopy:
    """Copy the first `num_tokens` positions of slot `source` to slot `target`."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class KvRelease:
    """The slot's content is not needed any more: its memory may go back to the system."""

    slot: int


@dataclass(frozen=True, slots=True)
class KvRead:
    """Hand out what the first `num_tokens` positions of a slot hold (`StepOutput.kv_reads`)."""

    slot: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class KvWrite:
    """Fill the first `num_tokens` positions of a slot with what a `KvRead` has handed out."""

    slot: int
    num_tokens: int
    data: bytes


KvOp = KvCopy | KvRelease | KvRead | KvWrite


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: `kv_ops` in their order, then all rows in one packed call.

    Rows are in ascending slot order and each slot occurs at most once. Rows may be empty (only
    KV operations are to be done then). A plan of neither means rest: there is nothing to do for
    now, so that what is kept for the next steps may go back to the system.
    """

    step_id: int
    rows: tuple[Row, ...]
    kv_ops: tuple[KvOp, ...] = ()

    @property
    def is_rest(self) -> bool:
        return not self.rows and not self.kv_ops

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)

    @property
    def num_logits(self) -> int:
        return sum(row.num_logits for row in self.rows)


@dataclass(frozen=True, slots=True)
class TokenAlternative:
    """A token the model could have chosen, with its log probability in nats."""

    token_id: int
    logprob: float


class SampledToken(NamedTuple):
    """What was drawn from one row of logits.

    `logprob` (nats, of the model's own distribution before any sampling parameter) and `top` are
    set only where the request asked for logprobs.
    """

    token_id: int
    entropy_nats: float
    logprob: float | None = None
    top: tuple[TokenAlternative, ...] = ()


class RowResult(NamedTuple):
    """Tokens to append to one sequence; `finish` ends it after them."""

    seq_id: int
    sampled: tuple[SampledToken, ...]
    finish: FinishReason | None = None

    def num_accepted(self, drafts: tuple[int, ...]) -> int:
        """How many of a row's drafts were drawn; the last of `sampled` may be one where it ends
        the sequence."""
        pairs = zip(drafts, self.sampled, strict=False)
        return sum(draft == token.token_id for draft, token in pairs)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step came to, in the order of the plan's rows.

    Attributes:
        step_id: of the plan.
        rows: one entry a plan row; `sampled` is empty for a prompt chunk without logits.
        model_ms: wall time inside the model.
    """

    step_id: int
    rows: tuple[RowResult, ...]
    model_ms: float


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One line of the step log that benchmarks and metrics read.

    `drafted` and `accepted` count draft tokens; `draft_ms` is wall time inside a draft model.
    """

    step_id: int
    num_rows: int
    num_tokens: int
    model_ms: float
    host_ms: float
    waiting: int = field(default=0)
    drafted: int = field(default=0)
    accepted: int = field(default=0)
    draft_ms: float = field(default=0.0)


class RowRecord(NamedTuple):
    """What one row of a step was.

    Attributes:
        slot: the KV slot, which is the lane that a sequence runs in.
        seq_id: whose.
        num_tokens: fed to the model, drafts included.
        drafted, accepted: drafts among them, and how many of those were right.
        is_prompt: a piece of a prompt rather than an answer's last token.
    """

    slot: int
    seq_id: int
    num_tokens: int
    drafted: int
    accepted: int
    is_prompt: bool


class LaneRecord(NamedTuple):
    """Who shared a step: `end_s` on the clock of `time.monotonic`, `step_ms` model and host."""

    step_id: int
    end_s: float
    step_ms: float
    rows: tuple[RowRecord, ...]
