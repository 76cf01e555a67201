"""A draft model: what it predicts, what it costs, and that its guesses change no text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from drafting_samples import CONFIGS, answers_in_a_storm, count_upwards
from engine_samples import Answers, make_text, run_to_end
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.backends import fake
from headrace.backends.base import StepOutput
from headrace.backends.fake import FakeBackend, LogitsFn, entropy_nats, hashed_logits
from headrace.runtime.config import EngineConfig, GenerationConfig
from headrace.runtime.core import Sequence, SequenceState
from headrace.runtime.draft_model import DraftModel
from headrace.runtime.drafting import asking
from headrace.runtime.drafting.drafter import Drafter
from headrace.runtime.drafting.model import Prediction, Wanted
from headrace.runtime.engine import Engine

VOCAB = 64
SLOTS = 3


def best(seq_id: int, position: int, output: StepOutput, line: int) -> int:
    return int(output.logits[line].argmax())


def running(seq_id: int, slot: int, tokens: list[int]) -> Sequence:
    state = SequenceState.RUNNING
    return Sequence(seq_id, tokens, len(tokens), 1000, state=state, slot=slot)


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 200))
def test_predictions_are_those_of_the_whole_text(seed: int, kv_tokens: int) -> None:
    """Guesses are accepted or not, sequences end, are interrupted, and come back in other slots."""
    rng, logits = random.Random(seed), hashed_logits(VOCAB)
    backend = FakeBackend(
        max_slots=SLOTS, kv_budget_tokens=400, context_tokens=150, max_row_tokens=16
    )
    model = DraftModel(backend, kv_tokens, best)
    sequences: dict[int, Sequence] = {}
    for number in range(25):
        for slot in range(SLOTS):
            if slot not in sequences or rng.random() < 0.1:
                if slot in sequences:
                    sequences[slot].slot = None
                known = slot in sequences and rng.random() < 0.5
                tokens = sequences[slot].tokens[:-3] if known else []
                tokens = [*tokens, *(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 50)))]
                sequences[slot] = running(10 * number + slot, slot, tokens)
        asked = [s for s in sequences.values() if model.unread_tokens(s, 3) is not None]
        rng.shuffle(asked)
        guesses: dict[int, list[int]] = {s.seq_id: [] for s in asked}
        for _ in range(rng.randrange(4)):
            found, _ = model.predict([Wanted(s, guesses[s.seq_id]) for s in asked])
            assert backend.held_tokens <= kv_tokens
            for sequence, prediction in zip(list(asked), found, strict=True):
                if prediction is None:
                    asked.remove(sequence)
                    continue
                row = logits([*sequence.tokens, *guesses[sequence.seq_id]])
                assert prediction.token_id == row.argmax()
                nats = entropy_nats(row[None])[0]
                assert prediction.entropy_nats == pytest.approx(nats, abs=1e-6)
                guesses[sequence.seq_id].append(prediction.token_id)
        for sequence in sequences.values():
            own = guesses.get(sequence.seq_id, [])
            sequence.tokens += [*own[: rng.randrange(len(own) + 1)], rng.randrange(VOCAB)]


def test_a_long_text_is_read_in_pieces() -> None:
    backend = FakeBackend(max_slots=1, context_tokens=600, max_row_tokens=512)
    model = DraftModel(backend, 600, best)
    sequence = running(0, 0, [1] * 300)
    for unread in (300, 172, 44, 1):
        assert model.unread_tokens(sequence, 4) == unread
        (found,), _ = model.predict([Wanted(sequence, [])])
        assert (found is None) is (unread > 128)


def test_what_it_has_no_room_for_is_not_guessed() -> None:
    model = DraftModel(FakeBackend(max_slots=1, context_tokens=20), 20, best)
    assert model.unread_tokens(running(0, 0, [1] * 16), 4) == 16
    assert model.unread_tokens(running(1, 0, [1] * 17), 4) is None
    assert model.unread_tokens(running(2, 1, [1]), 4) is None


def test_a_backend_that_fails_ends_drafting_only() -> None:
    model = DraftModel(FakeBackend(fail_at={4, 5}), 100, best)
    sequence = running(0, 0, [1, 2])
    assert model.unread_tokens(sequence, 1) == 2
    assert model.predict([Wanted(sequence, [])]) == ([None], 0.0)
    assert model.unread_tokens(sequence, 1) is None


class Oracle:
    """A model that guesses the numbers that follow, sure of itself, in a given time."""

    def __init__(self, ms: float, is_right: bool = True) -> None:
        self.ms, self.is_right, self.num_asked = ms, is_right, 0

    def unread_tokens(self, sequence: Sequence, num_guesses: int) -> int | None:
        return 1

    def predict(self, wanted: list[Wanted]) -> tuple[list[Prediction | None], float]:
        self.num_asked += 1
        step = 1 if self.is_right else 2
        found = [Prediction([*w.sequence.tokens, *w.guesses][-1] + step, 0.01) for w in wanted]
        return list(found), self.ms * (1 + 0.02 * len(wanted))


def test_a_cheap_model_that_is_right_is_asked_for_many() -> None:
    model = Oracle(0.5)
    drafted, accepted = count_upwards(Drafter(8, model=model), model.is_right)
    assert accepted == drafted > 300 * 2 * 5


@pytest.mark.parametrize(
    "model", [Oracle(12.0), Oracle(0.5, is_right=False)], ids=["slow", "wrong"]
)
def test_a_model_that_does_not_pay_is_tried_from_time_to_time(model: Oracle) -> None:
    count_upwards(Drafter(8, model=model), model.is_right)
    tried = model.num_asked
    assert 3 <= tried < 60


def test_the_time_of_the_model_counts() -> None:
    """What each time costs decides how often it is asked in a step."""
    numbers = [
        count_upwards(Drafter(8, model=Oracle(ms)), is_right=True)[0] for ms in (0.2, 2.0, 8.0)
    ]
    assert numbers[0] > numbers[1] > numbers[2]


def nearly(logits: LogitsFn, noise: float) -> LogitsFn:
    """Another model's opinion: the same, disturbed."""
    other = hashed_logits(VOCAB, noise)

    def disturbed(prefix: Any) -> NDArray[np.float32]:
        return logits(prefix) + other([3, *prefix])

    return disturbed


def engine_with_draft(draft: FakeBackend | None, **options: Any) -> Engine:
    backend = FakeBackend(
        max_slots=SLOTS,
        kv_budget_tokens=300,
        logits=hashed_logits(VOCAB, 4.0),
        delay_ms=0.5,  # most of a step, so that drafts are worth their time on any machine
    )
    return Engine(backend, make_text, [0], EngineConfig(**options), draft_backend=draft)


class Clock:
    """In place of the module `time`: looking at it takes 20 us, sleeping no more than it says."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        self.now_s += 20e-6
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def always_asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The model is asked in every step, and steps take as long as they are said to: whether a guess
    pays depends on times, and a busy machine has strange ones."""
    monkeypatch.setattr(asking, "TRIAL_STEPS", 0)
    monkeypatch.setattr(fake, "time", Clock())
    yield


def decode(seed: int, draft: FakeBackend | None, **options: Any) -> tuple[list[Any], Engine]:
    """Requests that arrive at random, one of them cancelled, some urgent enough to interrupt."""
    engine = engine_with_draft(draft, max_chunk_tokens=16, **options)
    return answers_in_a_storm(engine, seed), engine


@pytest.mark.usefixtures("always_asked")
@pytest.mark.parametrize("seed", range(10))
def test_a_draft_model_changes_no_answer(seed: int) -> None:
    plain, _ = decode(seed, None, max_draft_tokens=0)
    slots = 2 if seed % 3 == 0 else SLOTS  # one sequence may have nobody to guess for it
    draft = FakeBackend(max_slots=slots, logits=nearly(hashed_logits(VOCAB, 4.0), 0.5))
    drafted, engine = decode(seed, draft)
    assert drafted == plain
    assert sum(record.accepted for record in engine.steps) > 20
    assert sum(record.draft_ms for record in engine.steps) > 0
    engine.close()
    assert draft.closed


@pytest.mark.usefixtures("always_asked")
@pytest.mark.parametrize(
    "values",
    [*CONFIGS[:2], {"temperature": 1.0, "seed": 3}, {"frequency_penalty": 1.5}],
    ids=str,
)
def test_a_model_that_agrees_is_always_right(values: dict[str, Any]) -> None:
    """At any temperature: both draw with the same uniform number."""
    draft = FakeBackend(max_slots=SLOTS, logits=hashed_logits(VOCAB, 4.0))
    engine, options = engine_with_draft(draft, draft_pool_tokens=0), {**values, "ignore_eos": True}
    engine.add(engine.prepare([1, 2, 3], GenerationConfig(max_new_tokens=60, **options)))
    run_to_end(engine, Answers())
    drafted = sum(record.drafted for record in engine.steps)
    assert drafted == sum(record.accepted for record in engine.steps) > 5


@pytest.mark.usefixtures("always_asked")
def test_a_draft_model_that_fails_changes_no_answer() -> None:
    plain, _ = decode(1, None, max_draft_tokens=0)
    draft = FakeBackend(max_slots=SLOTS, logits=hashed_logits(VOCAB, 4.0), fail_at={15})
    assert decode(1, draft)[0] == plain


def test_no_draft_model_where_drafts_are_off(caplog: pytest.LogCaptureFixture) -> None:
    draft = FakeBackend(max_slots=SLOTS)
    engine, answers = engine_with_draft(draft, max_draft_tokens=0), Answers()
    engine.add(engine.prepare([1, 2], GenerationConfig(max_new_tokens=9)))
    run_to_end(engine, answers)
    assert draft.held_tokens == 0 and "max_draft_tokens is 0" in caplog.text
