"""Draft heads: when they are asked, what they cost, and that their guesses change no text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from drafting_samples import answers_in_a_storm, count_upwards
from engine_samples import Answers, make_text, run_to_end
from numpy.typing import NDArray

from headrace.backends.fake import FakeBackend, LogitsFn, hashed_logits
from headrace.runtime.config import EngineConfig, GenerationConfig
from headrace.runtime.core import SampledToken, Sequence
from headrace.runtime.draft_heads import DraftHeads
from headrace.runtime.drafting import budget
from headrace.runtime.drafting import heads as drafting_heads
from headrace.runtime.drafting.drafter import Drafter
from headrace.runtime.drafting.heads import HeadGuess
from headrace.runtime.engine import Engine
from headrace.runtime.errors import BackendError

VOCAB = 64
SLOTS = 3
HEADS = 4
State = NDArray[np.float32]


class MadeUpHeads:
    """Runs heads on the states of a fake backend: what a model with these logits would write
    greedily, as far as `noise` lets them; perfect without."""

    def __init__(self, logits: LogitsFn, noise: float = 0.0, fail_at: int = -1) -> None:
        self._logits, self._noise, self._fail_at = logits, noise, fail_at
        self._rng = random.Random(0)
        self.num_runs, self.closed = 0, False

    def run(self, states: list[State]) -> tuple[list[list[tuple[int, float]]], float]:
        self.num_runs += 1
        if self.num_runs == self._fail_at:
            raise BackendError("injected failure of heads")
        return [self._chain([int(t) for t in state if t >= 0]) for state in states], 0.01

    def _chain(self, prefix: list[int]) -> list[tuple[int, float]]:
        chain = []
        for _ in range(HEADS + 1):  # the first is the model's own
            right = int(self._logits(prefix).argmax())
            wrong = self._rng.random() < self._noise
            chain.append(((right + 1) % VOCAB if wrong else right, 0.3 if wrong else 0.9))
            prefix = [*prefix, right]
        return chain[1:]

    def close(self) -> None:
        self.closed = True


def engine_with_heads(runner: MadeUpHeads | None, **options: Any) -> Engine:
    backend = FakeBackend(
        max_slots=SLOTS,
        kv_budget_tokens=300,
        logits=hashed_logits(VOCAB, 4.0),
        gives_hidden=True,
    )
    heads = None if runner is None else DraftHeads(runner)
    return Engine(backend, make_text, [0], EngineConfig(**options), draft_heads=heads)


@pytest.fixture
def always_asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Heads are asked in every step, for one sequence at least, and drafts cost next to nothing,
    whatever takes time here."""
    monkeypatch.setattr(drafting_heads, "TRIAL_STEPS", 0)
    monkeypatch.setattr(budget.StepCost, "__call__", lambda self, n: 1.0 + 0.01 * n)
    yield


def decode(seed: int, runner: MadeUpHeads | None, **options: Any) -> tuple[list[Any], Engine]:
    """Requests that arrive at random, one of them cancelled, some urgent enough to interrupt."""
    engine = engine_with_heads(runner, max_chunk_tokens=16, **options)
    return answers_in_a_storm(engine, seed), engine


@pytest.mark.usefixtures("always_asked")
@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("seed", range(6))
def test_heads_change_no_answer(seed: int, noise: float) -> None:
    plain, _ = decode(seed, None, max_draft_tokens=0)
    runner = MadeUpHeads(hashed_logits(VOCAB, 4.0), noise)
    guessed, engine = decode(seed, runner)
    assert guessed == plain
    assert sum(record.accepted for record in engine.steps) > 10
    assert sum(record.draft_ms for record in engine.steps) > 0
    engine.close()
    assert runner.closed


@pytest.mark.usefixtures("always_asked")
def test_perfect_heads_are_always_right() -> None:
    """A state that belonged to another text, or to an earlier place, would make them wrong."""
    engine = engine_with_heads(MadeUpHeads(hashed_logits(VOCAB, 4.0)), draft_pool_tokens=0)
    for prompt in ([1, 2, 3], [9], [4, 4]):
        engine.add(engine.prepare(prompt, GenerationConfig(max_new_tokens=60, ignore_eos=True)))
    run_to_end(engine, Answers())
    drafted = sum(record.drafted for record in engine.steps)
    assert drafted == sum(record.accepted for record in engine.steps) > 60


@pytest.mark.usefixtures("always_asked")
def test_heads_that_fail_change_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    plain, _ = decode(1, None, max_draft_tokens=0)
    runner = MadeUpHeads(hashed_logits(VOCAB, 4.0), fail_at=9)
    assert decode(1, runner)[0] == plain
    assert runner.num_runs == 9 and "not asked any more" in caplog.text


def test_a_backend_without_states_has_no_guesses_of_heads() -> None:
    runner = MadeUpHeads(hashed_logits(VOCAB))
    backend = FakeBackend(max_slots=SLOTS)
    engine = Engine(backend, make_text, [0], EngineConfig(), draft_heads=DraftHeads(runner))
    engine.add(engine.prepare([1, 2], GenerationConfig(max_new_tokens=9, ignore_eos=True)))
    run_to_end(engine, Answers())
    assert runner.num_runs == 0


class Oracle:
    """Heads that guess the numbers that follow, in a given time a sequence."""

    def __init__(self, ms: float, probability: float = 0.9, is_right: bool = True) -> None:
        self.ms, self.probability, self.is_right = ms, probability, is_right
        self.num_asked = 0

    def knows(self, sequence: Sequence) -> bool:
        return True

    def guess(self, sequences: list[Sequence]) -> tuple[list[list[HeadGuess]], float]:
        self.num_asked += 1
        step = 1 if self.is_right else 2
        chains = [
            [HeadGuess(s.tokens[-1] + step + i, self.probability) for i in range(HEADS)]
            for s in sequences
        ]
        return chains, self.ms * len(sequences)

    def forget(self, seq_id: int) -> None:
        pass


def test_cheap_heads_that_are_right_draft_all_they_know() -> None:
    drafted, accepted = count_upwards(Drafter(8, heads=Oracle(0.2)), is_right=True)
    assert accepted == drafted > 290 * 2 * HEADS


@pytest.mark.parametrize(
    "heads",
    [Oracle(40.0), Oracle(0.5, is_right=False), Oracle(0.5, probability=0.01, is_right=False)],
    ids=["slow", "wrong", "unsure"],
)
def test_heads_that_do_not_pay_are_tried_from_time_to_time(heads: Oracle) -> None:
    count_upwards(Drafter(8, heads=heads), heads.is_right)
    assert 3 <= heads.num_asked < 60


def test_n_grams_win_where_they_are_likelier() -> None:
    """A text that repeats itself, and heads that are sure of something else."""
    heads = Oracle(0.2, is_right=False)
    drafter = Drafter(8, heads=heads)
    sequence = Sequence(0, [7, 8, 9, 10, 11, 12] * 4, 2, 10**6)
    from_n_grams = 0
    for step in range(60):
        drafts = drafter.propose([sequence]).get(0, ())
        expected = [(len(sequence.tokens) + i) % 6 + 7 for i in range(len(drafts) + 1)]
        right = 0
        while right < len(drafts) and drafts[right] == expected[right]:
            right += 1
        from_n_grams += right > 0 and step > 20
        tokens = expected[: right + 1]
        sequence.tokens += tokens
        drafter.observe(0, len(drafts), tuple(SampledToken(token, 0.1) for token in tokens))
        drafter.observe_step(1 + len(drafts), 10.0 + 0.2 * len(drafts))
    assert from_n_grams > 30
