"""Requests in, tokens out: one step at a time, on one thread.

`prepare` may be called from any thread and raises whatever is wrong with a request; from then on
nothing but `cancel`, its own sampling or the device can end it early. All else belongs to one
thread. A step is `start` (schedule, hand to the backend), `finish` (wait, sample, commit) and
`read` (text, stop strings): in this order in `step`, while `pipeline` reads a step as the next one
runs.

A request fails alone where its own sampling fails. A step that the backend fails ends everything
that ran in it; waiting requests go on. A second failure with no good step between says that the
backend is broken: the engine is then closed with that error. Where a backend's process died, what
ran goes on in another one (`restarts`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import NamedTuple

from headrace.backends.base import Backend, StepOutput
from headrace.runtime.admission import engine_limits
from headrace.runtime.answer import Answer, Request, StepEvent, Text, drawn_together
from headrace.runtime.config import EngineConfig, GenerationConfig
from headrace.runtime.core import (
    FinishReason,
    RowResult,
    Sequence,
    StepPlan,
    StepRecord,
    StepResult,
)
from headrace.runtime.draft_heads import DraftHeads
from headrace.runtime.draft_model import DraftModel
from headrace.runtime.drafting.drafter import Drafter, num_drafts
from headrace.runtime.errors import (
    BackendError,
    EngineClosedError,
    EngineProcessError,
    RequestError,
)
from headrace.runtime.grammar.matcher import GrammarCompiler
from headrace.runtime.request_maker import RequestMaker
from headrace.runtime.restarts import Restarts
from headrace.runtime.scheduling.fairness import Fairness
from headrace.runtime.scheduling.scheduler import Scheduler
from headrace.runtime.step_log import StepLog
from headrace.runtime.transfers import Transfers

logger = logging.getLogger(__name__)


class Engine:
    """Runs requests on a backend.

    Args:
        backend: not loaded yet; closed with the engine.
        make_text: a fresh text stream for an answer.
        eos_token_ids: tokens with which the model ends a text.
        grammars: for requests with a grammar, which are refused without it.
        drafter: instead of the one that `config` asks for.
        draft_backend: of a smaller model of the same vocabulary that guesses; as `backend`.
        draft_heads: that guess from the hidden states of `backend`.

    Raises:
        whatever `load` of a backend raises.
    """

    def __init__(
        self,
        backend: Backend,
        make_text: Callable[[GenerationConfig], Text],
        eos_token_ids: Iterable[int],
        config: EngineConfig | None = None,
        fairness: Fairness | None = None,
        grammars: GrammarCompiler | None = None,
        drafter: Drafter | None = None,
        draft_backend: Backend | None = None,
        draft_heads: DraftHeads | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.capabilities = backend.load()
        self.log = StepLog()
        self.closed_by: Exception | None = None
        self._backend = backend
        self._make_text = make_text
        self._limits = engine_limits(self.config, self.capabilities)
        self._draft_model: DraftModel | None = None
        self._draft_heads = draft_heads
        self._drafter = drafter or self._make_drafter(draft_backend)
        self._scheduler = Scheduler(self._limits, fairness, self._drafter)
        self._requests = RequestMaker(self._limits, self.capabilities, eos_token_ids, grammars)
        self._answers: dict[int, Answer] = {}
        self._transfers, self._restarts = Transfers(), Restarts()
        self._last_step_failed = False
        # The plan under way, its ticket or why it could not be handed over, and when it began.
        self._started: tuple[StepPlan, int | Exception, float] | None = None
        self._finished: _Finished | None = None  # the step before, whose text is not made yet

    @property
    def has_work(self) -> bool:
        return self.closed_by is None and (self._scheduler.has_work or self._finished is not None)

    @property
    def steps(self) -> deque[StepRecord]:
        """The newest steps, oldest first."""
        return self.log.steps

    @property
    def num_waiting(self) -> int:
        """Answers that have no slot yet."""
        return self._scheduler.num_waiting

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_free_slots(self) -> int:
        return self._scheduler.num_free_slots

    def prepare(
        self,
        prompt_ids: Iterable[int],
        config: GenerationConfig,
        make_text: Callable[[GenerationConfig], Text] | None = None,
    ) -> Request:
        """Check a request and make what its answers need. Any thread.

        Args:
            make_text: instead of the engine's own.

        Raises:
            RequestError: no prompt, a token that the vocabulary does not have, or a grammar that
                cannot be used.
            ConfigError: a grammar, and llguidance is not installed.
            PromptTooLongError: the context has no room for a new token.
            InsufficientMemoryError: the KV budget could never hold prompt and answer.
        """
        return self._requests.make(prompt_ids, config, make_text or self._make_text)

    def read_kv(self, tokens: list[int]) -> tuple[int, Future[bytes]]:
        """Ask for what is there of a text: how many tokens, and their keys and values, which come
        with the next step.

        Raises:
            RequestError: nothing is there.
        """
        op = self._scheduler.read_kv(tokens)
        if op is None:
            raise RequestError("nothing of this text is in the cache; have it answered first")
        return op.num_tokens, self._transfers.expect(op)

    def write_kv(self, tokens: list[int], data: bytes) -> Future[bytes]:
        """Have a text in the cache from the next step on, given what `read_kv` gave.

        Raises:
            RequestError: it does not fit.
        """
        op = self._scheduler.write_kv(tokens, data)
        if op is None:
            raise RequestError(
                f"there is no room to keep {len(tokens)} tokens (prefix_cache_bytes, slots in use)"
            )
        return self._transfers.expect(op)

    def add(self, request: Request) -> None:
        """Queue a prepared request."""
        for answer in request.answers:
            self._scheduler.add(answer.sequence)
            self._answers[answer.sequence.seq_id] = answer

    def cancel(self, request: Request) -> list[StepEvent]:
        """End a request; what was written so far stands. Nothing for one that has ended."""
        events = self.read()
        events += [
            StepEvent(request, answer.cancelled())
            for answer in request.answers
            if self._drop(answer)
        ]
        return events

    def step(self) -> list[StepEvent]:
        """Run one step and say what came of it; nothing when there is nothing to do.

        Raises:
            EngineClosedError: the engine was closed, or its backend is broken.
        """
        self.start()
        return [*self.finish(), *self.read()]

    def start(self) -> None:
        """Hand the next step to the backend, if there is something to do.

        Raises:
            EngineClosedError: the engine was closed, or its backend is broken.
        """
        if self.closed_by is not None:
            raise EngineClosedError(str(self.closed_by)) from self.closed_by
        start_s = time.perf_counter()
        plan = self._scheduler.schedule()
        if plan is None:
            return
        try:
            ticket: int | Exception = self._backend.submit(plan)
        except Exception as error:
            ticket = error
        self._started = plan, ticket, start_s

    def finish(self) -> list[StepEvent]:
        """Wait for the step that was started and draw its tokens; says whose requests failed."""
        assert self._finished is None
        if self._started is None:
            return []
        (plan, ticket, start_s), self._started = self._started, None
        try:
            if isinstance(ticket, Exception):
                raise ticket
            output = self._backend.collect(ticket)
        except EngineProcessError as error:
            return self._restart(error)
        except Exception as error:
            return self._fail_step(plan, error)
        self._last_step_failed = False
        self._restarts.step_done()
        if plan.kv_ops:
            self._transfers.settle(plan, output.kv_reads)
        answers, results = self._sample(plan, output)
        self._scheduler.commit(plan, StepResult(plan.step_id, results, output.model_ms))
        draft_ms = 0.0 if self._drafter is None else self._drafter.model_ms
        elapsed_ms = (time.perf_counter() - start_s) * 1e3
        self._finished = _Finished(plan, answers, output.model_ms, draft_ms, elapsed_ms)
        return []

    def read(self) -> list[StepEvent]:
        """What the last finished step means to those who asked. A stop string that comes to light
        ends its answer, also in the step that is running."""
        step, self._finished = self._finished, None
        if step is None:
            return []
        start_s = time.perf_counter()
        answers = [answer for answer in step.answers if answer is not None]
        events: list[StepEvent] = []
        for answer in answers:
            try:
                if answer.error is None and answer.read():
                    self._scheduler.end(answer.sequence.seq_id, FinishReason.STOP)
                    answer.sequence.finish_reason = FinishReason.STOP
            except Exception as error:  # a request fails alone, whatever went wrong in it
                answer.error = error
            if answer.error is not None and answer.sequence.seq_id in self._answers:
                logger.warning("a request failed: %s", answer.error)
                events += self._fail_requests([answer.sequence], answer.error)
        for answer in answers:
            if answer.sampled and answer.sequence.seq_id in self._answers:
                delta = answer.delta()
                if delta.finish_reason is not None:
                    del self._answers[answer.sequence.seq_id]
                events.append(StepEvent(answer.request, delta))
        read_ms = (time.perf_counter() - start_s) * 1e3
        self.log.add(
            step.plan,
            [0 if answer is None else answer.num_accepted for answer in step.answers],
            model_ms=step.model_ms,
            total_ms=step.elapsed_ms + (0.0 if self._started else read_ms),
            draft_ms=step.draft_ms,
            waiting=self._scheduler.num_waiting,
        )
        return events

    def rest(self) -> list[StepEvent]:
        """Have the backends give back what they keep for the next steps; while there is no work."""
        if self._draft_model is not None:
            self._draft_model.rest()
        try:
            self._backend.collect(self._backend.submit(StepPlan(0, ())))
        except EngineProcessError as error:
            return self._restart(error)
        except BackendError as error:  # nobody's request failed; the next step shows what is left
            logger.warning("the backend could not rest: %s", error)
        return []

    def close(self, reason: Exception | None = None) -> list[StepEvent]:
        """End everything and give the backend's memory back. Calling it again does nothing.

        Args:
            reason: what unfinished requests fail with; `EngineClosedError` unless given.
        """
        if self.closed_by is not None:
            return []
        events = self.read()
        self.closed_by = reason or EngineClosedError("the runtime was closed")
        requests = dict.fromkeys(answer.request for answer in self._answers.values())
        events += [StepEvent(request, None, self.closed_by) for request in requests]
        for answer in list(self._answers.values()):
            self._drop(answer)
        self._transfers.fail(self.closed_by)
        self._backend.close()
        for guesser in (self._draft_model, self._draft_heads):
            if guesser is not None:
                guesser.close()
        return events

    def check_integrity(self) -> None:
        """Assert that the books are in order; between steps."""
        self._scheduler.check_integrity()
        held = self._scheduler.num_waiting + self._scheduler.num_running
        unfinished = [a for a in self._answers.values() if a.sequence.finish_reason is None]
        assert len(unfinished) == held and (self._finished or len(self._answers) == held)

    def _make_drafter(self, draft_backend: Backend | None) -> Drafter | None:
        config, caps = self.config, self.capabilities
        max_drafts = num_drafts(
            config.max_draft_tokens, max_row_tokens=caps.max_row_tokens, exact_rows=caps.exact_rows
        )
        if not max_drafts:
            if draft_backend is not None:
                logger.warning(
                    "the draft model is not used: max_draft_tokens is 0, as it is by default where "
                    "drafts could change an answer"
                )
            return None
        if draft_backend is not None:
            self._draft_model = DraftModel(
                draft_backend,
                caps.kv_budget_tokens,
                lambda seq_id, *where: self._answers[seq_id].guess(*where),
            )
        cap_nats, pool_tokens = config.batch_entropy_cap_nats, config.draft_pool_tokens
        return Drafter(max_drafts, cap_nats, pool_tokens, self._draft_model, self._draft_heads)

    def _sample(
        self, plan: StepPlan, output: StepOutput
    ) -> tuple[list[Answer | None], tuple[RowResult, ...]]:
        """Draw the tokens of every row with logits; answers and results in the order of the plan.
        None stands for an answer that ended while the step ran."""
        answers = [self._answers.get(row.seq_id) for row in plan.rows]
        results: list[RowResult] = []
        drawn = drawn_together(plan.rows, answers, output)
        line = 0
        for row, answer in zip(plan.rows, answers, strict=True):
            if answer is None:
                results.append(RowResult(row.seq_id, ()))
            else:
                results.append(answer.take(row, output, line, drawn))
                if self._draft_heads is not None and answer.sampled:
                    self._draft_heads.keep(answer.sequence, len(answer.sampled), output, line)
            line += row.num_logits
        return answers, tuple(results)

    def _fail_step(self, plan: StepPlan, error: Exception) -> list[StepEvent]:
        """End what ran in a failed step, or everything where the backend is broken."""
        failed = self._scheduler.fail(plan)
        if not isinstance(error, BackendError):
            cause, error = error, BackendError(f"a step failed unexpectedly: {error!r}")
            error.__cause__ = cause
            return self.close(error)
        if self._last_step_failed:
            logger.error("the backend failed twice in a row and is given up: %s", error)
            return self.close(error)
        self._last_step_failed = True
        self._transfers.fail(error)
        logger.warning("a step failed and ended %d sequences: %s", len(failed), error)
        return self._fail_requests(failed, error)

    def _restart(self, error: EngineProcessError) -> list[StepEvent]:
        """The backend's process died; its next step begins another, where what ran goes on."""
        logger.warning("%s; it is started again", error)
        self._transfers.fail(error)
        stuck = self._restarts.died(self._scheduler.restart())
        return (
            self.close(error) if self._restarts.is_hopeless else self._fail_requests(stuck, error)
        )

    def _fail_requests(self, sequences: Iterable[Sequence], error: Exception) -> list[StepEvent]:
        requests = dict.fromkeys(self._answers[s.seq_id].request for s in sequences)
        for answer in [answer for request in requests for answer in request.answers]:
            self._drop(answer)
        return [StepEvent(request, None, error) for request in requests]

    def _drop(self, answer: Answer) -> bool:
        """Forget an answer; False where it had ended."""
        seq_id = answer.sequence.seq_id
        self._scheduler.cancel(seq_id)
        return self._answers.pop(seq_id, None) is not None


class _Finished(NamedTuple):
    """A step that is committed. `answers`: of its rows, None where they ended while it ran."""

    plan: StepPlan
    answers: list[Answer | None]
    model_ms: float
    draft_ms: float
    elapsed_ms: float
