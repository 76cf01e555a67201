"""Overlapped steps against steps in order: the same events, whatever happens in between."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from engine_samples import EOS, VOCAB, Answers, make_engine, make_text
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backends.fake import FakeBackend
from headrace.runtime.config import EngineConfig, GenerationConfig
from headrace.runtime.core import FinishReason, StepPlan
from headrace.runtime.engine import Engine
from headrace.runtime.errors import BackendError
from headrace.runtime.pipeline import ThreadedBackend, step_in_order, step_overlapped

REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": st.lists(st.integers(1, 4), min_size=1, max_size=24),
            "temperature": st.sampled_from([0.0, 0.8]),
            "stop": st.sampled_from([[], ["a"], ["ab", "c"], ["q", "Z"]]),
            "max_new_tokens": st.integers(1, 24),
            "n": st.integers(1, 2),
            "priority": st.integers(0, 2),
            "after": st.integers(0, 12),  # steps before it comes
        }
    ),
    min_size=1,
    max_size=6,
)


def repetitive(prefix: Any) -> Any:
    """Logits of few letters that often repeat, so that drafts are accepted and refused."""
    row = np.full(VOCAB, -20.0, np.float32)
    key = prefix[-1] * 7 + len(prefix) // 5
    for i, letter in enumerate((1, 2, 3, 4)):
        row[letter] = (key * (i + 3)) % 5
    row[EOS] = 1.0
    return row


def overlapped_engine(backend: FakeBackend, **options: Any) -> Engine:
    config = EngineConfig.from_dict({**options, "pipeline_depth": 2})
    return Engine(ThreadedBackend(backend), make_text, [EOS], config)


def played(engine: Engine, requests: list[dict[str, Any]], step: Any) -> list[tuple[Any, ...]]:
    """Everything that a caller hears of each answer."""
    answers = Answers()
    prepared = []
    for number, wanted in enumerate(requests):
        options = {k: v for k, v in wanted.items() if k not in ("prompt", "after")}
        config = GenerationConfig(seed=number, **options)
        prepared.append((wanted["after"], engine.prepare(wanted["prompt"], config)))
    waiting = list(prepared)
    for turn in range(2000):
        for entry in [entry for entry in waiting if entry[0] <= turn]:
            waiting.remove(entry)
            engine.add(entry[1])
        if not waiting and not engine.has_work:
            break
        if engine.has_work:
            step(engine, answers.take)
            engine.check_integrity()
    else:
        raise AssertionError("it does not end")
    return [
        (answers.tokens.get(key), answers.texts.get(key), answers.finish.get(key))
        for _, request in prepared
        for key in [(request, index) for index in range(request.config.n)]
    ]


@settings(deadline=None, max_examples=60)
@given(requests=REQUESTS, drafts=st.sampled_from([0, 4]), slots=st.integers(1, 4))
def test_overlapped_is_in_order(requests: list[dict[str, Any]], drafts: int, slots: int) -> None:
    options = {"max_draft_tokens": drafts, "max_sequences": slots, "max_chunk_tokens": 8}
    backends = [FakeBackend(max_slots=slots, logits=repetitive) for _ in range(2)]
    plain = make_engine(backends[0], **options)
    overlapped = overlapped_engine(backends[1], **options)
    try:
        wanted = played(plain, requests, step_in_order)
        assert played(overlapped, requests, step_overlapped) == wanted
    finally:
        overlapped.close()
    assert backends[1].closed


def start_two(engine: Engine) -> tuple[Answers, list[Any]]:
    requests = [
        engine.prepare([1 + i, 9], GenerationConfig(max_new_tokens=40, ignore_eos=True, seed=i))
        for i in range(2)
    ]
    for request in requests:
        engine.add(request)
    return Answers(), requests


def test_cancelling_between_steps_keeps_what_was_drawn() -> None:
    """The last step's tokens are not yet text when somebody cancels."""
    texts = []
    for engine, step in (
        (make_engine(max_draft_tokens=0), step_in_order),
        (overlapped_engine(FakeBackend(max_slots=16), max_draft_tokens=0), step_overlapped),
    ):
        answers, requests = start_two(engine)
        for _ in range(6):
            step(engine, answers.take)
        answers.take(engine.cancel(requests[0]))
        while engine.has_work:
            step(engine, answers.take)
        engine.check_integrity()
        assert answers.finish[requests[0], 0] is FinishReason.CANCELLED
        texts.append([answers.texts[request, 0] for request in requests])
        engine.close()
    assert texts[0] == texts[1]


def test_a_failed_step_ends_who_ran_and_the_next_goes_on() -> None:
    engine = overlapped_engine(FakeBackend(max_slots=2, fail_at={3}), max_draft_tokens=0)
    answers, requests = start_two(engine)
    for _ in range(5):
        step_overlapped(engine, answers.take)
    assert set(answers.errors) == set(requests)
    assert all(len(answers.tokens[request, 0]) == 3 for request in requests)
    late = engine.prepare([3], GenerationConfig(max_new_tokens=4, ignore_eos=True))
    engine.add(late)
    while engine.has_work:
        step_overlapped(engine, answers.take)
    assert len(answers.tokens[late, 0]) == 4
    engine.close()


def test_closing_in_the_middle_of_a_step_delivers_what_was_there() -> None:
    backend = FakeBackend(max_slots=2, delay_ms=20.0)
    engine = overlapped_engine(backend, max_draft_tokens=0)
    answers, requests = start_two(engine)
    for _ in range(3):
        step_overlapped(engine, answers.take)
    engine.start()  # runs while the engine is closed
    answers.take(engine.close())
    assert set(answers.errors) == set(requests) and backend.closed
    assert all(len(answers.tokens[request, 0]) == 3 for request in requests)
    assert not [t for t in threading.enumerate() if t.name == "headrace-model"]


def test_a_closed_backend_takes_nothing() -> None:
    backend = ThreadedBackend(FakeBackend())
    backend.load()
    backend.close()
    backend.close()
    with pytest.raises(BackendError, match="closed"):
        backend.submit(StepPlan(0, (), ()))
