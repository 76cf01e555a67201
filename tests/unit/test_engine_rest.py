"""An engine without work has its backend rest: once, not amid work, and whatever comes of it."""

from __future__ import annotations

import time

import pytest
from engine_samples import Answers, make_engine, make_runtime, make_text, run_to_end

from headrace.backends.fake import FakeBackend
from headrace.runtime import GenerationConfig, restarts, worker
from headrace.runtime.core import Sequence, SequenceState, StepPlan
from headrace.runtime.draft_model import DraftModel
from headrace.runtime.drafting.model import Wanted
from headrace.runtime.engine import Engine
from headrace.runtime.errors import BackendError, EngineClosedError, EngineProcessError

AFTER_S = 0.05
GREEDY = GenerationConfig(max_new_tokens=4, ignore_eos=True)


class Restless(FakeBackend):
    """Fails with this error where it is to rest; one of a process takes the slots with it."""

    def __init__(self, error: BackendError) -> None:
        super().__init__()
        self._error = error

    def submit(self, plan: StepPlan) -> int:
        if plan.is_rest:
            if isinstance(self._error, EngineProcessError):
                self._kv.held[:] = [[] for _ in self._kv.held]
            raise self._error
        return super().submit(plan)


def wait_for_rest(backend: FakeBackend, times: int) -> None:
    deadline_s = time.monotonic() + 20
    while backend.num_rests < times:
        assert time.monotonic() < deadline_s, "it never rests"
        time.sleep(AFTER_S / 10)


def ask(engine: Engine, prompt: list[int]) -> list[int]:
    answers, request = Answers(), engine.prepare(prompt, GREEDY)
    engine.add(request)
    run_to_end(engine, answers)
    return answers.tokens[request, 0]


@pytest.mark.parametrize("depth", [1, 2])
def test_once_after_work(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    monkeypatch.setattr(worker, "_REST_AFTER_S", AFTER_S)
    backend = FakeBackend()
    with make_runtime(backend, pipeline_depth=depth) as runtime:
        time.sleep(3 * AFTER_S)
        assert backend.num_rests == 0  # there was no step that could have left anything
        for times in (1, 2):
            runtime.generate("abc", max_new_tokens=3)
            wait_for_rest(backend, times)
            time.sleep(3 * AFTER_S)
            assert backend.num_rests == times


def test_not_amid_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_REST_AFTER_S", 0.0)
    backend = FakeBackend(delay_ms=1.0)
    with make_runtime(backend) as runtime:
        handle = runtime.submit("abc", max_new_tokens=100, ignore_eos=True)
        handle.result()
        assert backend.num_rests <= 1  # one may come just behind the end


@pytest.mark.parametrize("error", [BackendError("no"), EngineProcessError("killed")])
def test_answers_are_the_same_after_one_that_failed(error: BackendError) -> None:
    engine = make_engine(Restless(error), max_chunk_tokens=8)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    first = ask(engine, prompt)
    assert engine.rest() == []
    assert ask(engine, prompt) == first  # what it kept of the prompt may be gone
    assert engine.closed_by is None


@pytest.mark.parametrize("error", [None, BackendError("no"), EngineProcessError("killed")])
def test_a_draft_model_rests_too(error: BackendError | None) -> None:
    draft, backend = FakeBackend() if error is None else Restless(error), FakeBackend()
    engine = Engine(backend, make_text, [0], draft_backend=draft)
    first = ask(engine, [1, 2, 3])
    assert engine.rest() == []
    assert draft.num_rests == (error is None)
    assert backend.num_rests == 1
    assert ask(engine, [1, 2, 3]) == first
    assert engine.closed_by is None


def test_a_draft_model_that_fails_at_rest_guesses_no_more() -> None:
    sequence = Sequence(0, [1, 2], 2, 1000, state=SequenceState.RUNNING, slot=0)
    for backend, unread in ((FakeBackend(), 1), (Restless(EngineProcessError("killed")), None)):
        model = DraftModel(backend, 100, lambda *where: 0)
        assert model.unread_tokens(sequence, 1) == 2
        assert model.predict([Wanted(sequence, [])])[0] != [None]
        model.rest()
        assert model.unread_tokens(sequence, 1) == unread


def test_an_engine_that_ends_at_rest_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_REST_AFTER_S", 0.0)
    monkeypatch.setattr(restarts, "MAX_DEATHS", 0)
    with make_runtime(Restless(EngineProcessError("killed"))) as runtime:
        assert runtime.generate("abc", max_new_tokens=3).text
        with pytest.raises(EngineClosedError, match="killed"):
            while True:
                runtime.generate("abc", max_new_tokens=3)
