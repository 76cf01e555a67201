"""An engine whose backend's process dies: answers go on with the same text."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_samples import EOS, LETTERS, Answers, make_engine, run_arrivals, run_to_end

from headrace.backends.fake import FakeBackend
from headrace.runtime.config import GenerationConfig
from headrace.runtime.core import Row, Sequence
from headrace.runtime.errors import EngineProcessError, RequestError
from headrace.runtime.restarts import MAX_DEATHS, Restarts

GREEDY = GenerationConfig(max_new_tokens=24, ignore_eos=True)
CONFIGS = [
    GREEDY,
    GenerationConfig(max_new_tokens=24, temperature=0.8, top_p=0.95, seed=5),
    GenerationConfig(max_new_tokens=24, temperature=1.0, seed=7, n=3, ignore_eos=True),
    GenerationConfig(max_new_tokens=40, temperature=0.9, seed=1, stop=("a", "he", "qz")),
    GenerationConfig(max_new_tokens=24, repetition_penalty=1.3, frequency_penalty=0.5, logprobs=2),
    GenerationConfig(max_new_tokens=24, temperature=0.7, seed=3, min_new_tokens=12, min_p=0.05),
]


def arrivals() -> list[tuple[int, list[int], GenerationConfig]]:
    choose = random.Random(3)
    return [
        (choose.randrange(30), [choose.randrange(1, len(LETTERS)) for _ in range(1 + 9 * i)], c)
        for i, c in enumerate(CONFIGS * 2)
    ]


@pytest.mark.parametrize("kept_bytes", [0, None])
@pytest.mark.parametrize("seed", range(5))
def test_deaths_do_not_change_any_text(seed: int, kept_bytes: int | None) -> None:
    options: dict[str, Any] = {"max_chunk_tokens": 32, "prefix_cache_bytes": kept_bytes}
    calm = run_arrivals(make_engine(FakeBackend(max_slots=4), **options), arrivals(), None)
    choose = random.Random(seed)
    # Far enough apart for everybody to get a token between: nobody is suspected.
    deaths = {30 * i + choose.randrange(15) for i in range(4)}
    backend = FakeBackend(max_slots=4, die_at=deaths)
    engine = make_engine(backend, **options)
    assert run_arrivals(engine, arrivals(), None) == calm
    assert backend.num_steps > max(deaths)


def test_a_text_without_a_seed_goes_on_too() -> None:
    """What was written before the death is the beginning of what a new process reads."""
    backend = FakeBackend(die_at={10})
    config = GenerationConfig(max_new_tokens=30, temperature=1.0, ignore_eos=True)
    engine, answers = make_engine(backend), Answers()
    request = engine.prepare([1, 2], config)
    engine.add(request)
    run_to_end(engine, answers)
    seed = request.answers[0].sampler.seed
    again = GenerationConfig(max_new_tokens=30, temperature=1.0, ignore_eos=True, seed=seed)
    assert tokens_of([1, 2], again) == answers.tokens[request, 0]


def test_a_process_that_always_dies_is_given_up() -> None:
    engine, answers = make_engine(FakeBackend(die_at=range(100))), Answers()
    requests = [engine.prepare([1, 2], GREEDY) for _ in range(3)]
    for request in requests:
        engine.add(request)
    run_to_end(engine, answers)
    assert set(answers.errors) == set(requests)
    assert all(isinstance(error, EngineProcessError) for error in answers.errors.values())
    assert isinstance(engine.closed_by, EngineProcessError)


class Poisoned(FakeBackend):
    """Dies of any row with this token."""

    def __init__(self, token: int) -> None:
        super().__init__()
        self.token = token

    def _append(self, row: Row) -> Any:
        if self.token in row.tokens:
            self._kv.held[:] = [[] for _ in self._kv.held]
            raise EngineProcessError("injected")
        return super()._append(row)


def test_a_request_that_kills_fails_alone() -> None:
    engine, answers = make_engine(Poisoned(63), max_chunk_tokens=8, max_draft_tokens=0), Answers()
    longer = GenerationConfig(max_new_tokens=60, logit_bias={63: float("-inf")}, ignore_eos=True)
    good = [engine.prepare([1 + i, 2], longer) for i in range(2)]
    poison = engine.prepare([5] * 40 + [63, 6], longer)  # a few steps away from its token
    for request in (*good, poison):
        engine.add(request)
    run_to_end(engine, answers)
    assert list(answers.errors) == [poison] and engine.closed_by is None
    for request in good:
        assert answers.tokens[request, 0] == tokens_of(request.prompt_ids, longer)


def test_sessions_hear_of_a_death() -> None:
    engine = make_engine(FakeBackend(die_at={1}), prefix_cache_bytes=None)
    request = engine.prepare(range(1, 30), GenerationConfig(max_new_tokens=1))
    engine.add(request)
    engine.step()
    _, promise = engine.read_kv(list(range(1, 30)))
    engine.step()
    with pytest.raises(EngineProcessError, match="injected"):
        promise.result(0)
    with pytest.raises(RequestError, match="nothing of this text"):
        engine.read_kv(list(range(1, 30)))
    engine.check_integrity()


def test_counting() -> None:
    restarts = Restarts()
    slow, fast = Sequence(1, [1, 2], 2, 9), Sequence(2, [1, 2], 2, 9)
    for _ in range(MAX_DEATHS):
        assert restarts.died([slow, fast]) == [] and not restarts.is_hopeless
        restarts.step_done()
        fast.tokens.append(EOS)
    assert restarts.died([slow, fast]) == [slow]


def tokens_of(prompt: Any, config: GenerationConfig) -> list[int]:
    engine, answers = make_engine(FakeBackend()), Answers()
    request = engine.prepare(prompt, config)
    engine.add(request)
    run_to_end(engine, answers)
    return answers.tokens[request, 0]
