from __future__ import annotations

import math
import random

import pytest
from engine_samples import (
    EOS,
    LETTERS,
    VOCAB,
    Answers,
    make_engine,
    run_to_end,
    speller,
    tokens_alone,
)

from headrace.backends.fake import FakeBackend, hashed_logits, scripted_logits
from headrace.runtime.answer import Request
from headrace.runtime.config import GenerationConfig
from headrace.runtime.core import FinishReason
from headrace.runtime.engine import Engine
from headrace.runtime.errors import (
    BackendError,
    EngineClosedError,
    InsufficientMemoryError,
    PromptTooLongError,
    RequestError,
)
from headrace.runtime.sampling.sampler import sample_seed

GREEDY = GenerationConfig(max_new_tokens=24, ignore_eos=True)
SAMPLED = GenerationConfig(max_new_tokens=24, temperature=0.8, top_p=0.95, seed=5)
BOTH = pytest.mark.parametrize("config", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


def prompts_of_many_lengths(count: int = 16) -> list[list[int]]:
    choose = random.Random(1)
    return [[choose.randrange(1, VOCAB) for _ in range(1 + i * 7)] for i in range(count)]


def run_one(engine: Engine, prompt: list[int], config: GenerationConfig) -> tuple[Answers, Request]:
    answers, request = Answers(), engine.prepare(prompt, config)
    engine.add(request)
    run_to_end(engine, answers)
    return answers, request


@BOTH
def test_batch_equals_single(config: GenerationConfig) -> None:
    """16 prompts, arriving at random steps, get what each gets alone."""
    prompts, choose = prompts_of_many_lengths(), random.Random(2)
    engine, answers, requests = make_engine(), Answers(), []
    for prompt in prompts:
        for _ in range(choose.randrange(4)):
            answers.take(engine.step())
        requests.append(engine.prepare(prompt, config))
        engine.add(requests[-1])
    run_to_end(engine, answers)
    assert max(record.num_rows for record in engine.steps) > 8
    for prompt, request in zip(prompts, requests, strict=True):
        assert answers.tokens[request, 0] == tokens_alone(prompt, config)


@BOTH
@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 64])
def test_chunked_equals_whole(config: GenerationConfig, chunk: int) -> None:
    for prompt in ([5] * 50, list(range(1, 64))):
        expected = tokens_alone(prompt, config)
        assert tokens_alone(prompt, config, max_chunk_tokens=chunk) == expected


@BOTH
@pytest.mark.parametrize("slots", [1, 3, 16])
def test_n_answers_equal_n_requests(config: GenerationConfig, slots: int) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    engine, answers = make_engine(max_sequences=slots, max_chunk_tokens=4), Answers()
    seed = config.seed or 0
    request = engine.prepare(prompt, GenerationConfig(**{**config.to_dict(), "n": 5}))
    stranger = engine.prepare([1, 2, 3], config)
    for one in (request, stranger):
        engine.add(one)
    run_to_end(engine, answers)
    for index in range(5):
        alone = GenerationConfig(**{**config.to_dict(), "seed": sample_seed(seed, index)})
        assert answers.tokens[request, index] == tokens_alone(prompt, alone)
    assert answers.tokens[stranger, 0] == tokens_alone([1, 2, 3], config)
    if config is SAMPLED:
        assert len({tuple(answers.tokens[request, i]) for i in range(5)}) == 5


@BOTH
@pytest.mark.parametrize("steps_before", [0, 1, 3, 10])
def test_cancel_leaves_the_others_unchanged(config: GenerationConfig, steps_before: int) -> None:
    prompts = prompts_of_many_lengths(6)
    engine, answers = make_engine(max_sequences=4, max_chunk_tokens=8), Answers()
    requests = [engine.prepare(prompt, config) for prompt in prompts]
    for request in requests:
        engine.add(request)
    for _ in range(steps_before):
        answers.take(engine.step())
    for i in (1, 3, 5):
        answers.take(engine.cancel(requests[i]))
        assert engine.cancel(requests[i]) == []
        engine.check_integrity()
    run_to_end(engine, answers)
    for i, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        if i % 2:
            assert answers.finish[request, 0] is FinishReason.CANCELLED
        else:
            assert answers.tokens[request, 0] == tokens_alone(prompt, config)


@pytest.mark.parametrize("kept_tokens", [0, 30])
def test_slots_and_memory_come_back(kept_tokens: int) -> None:
    backend = FakeBackend(max_slots=3)
    engine = make_engine(backend, prefix_cache_bytes=4 * kept_tokens)
    choose = random.Random(3)
    answers, live = Answers(), []
    for i in range(300):
        request = engine.prepare([1 + i % 60] * choose.randrange(1, 9), GREEDY)
        engine.add(request)
        live.append(request)
        if choose.random() < 0.3:
            answers.take(engine.cancel(live.pop(choose.randrange(len(live)))))
        answers.take(engine.step())
    run_to_end(engine, answers)
    assert backend.held_tokens <= kept_tokens and engine.num_free_slots == 3


def test_end_of_text_token_ends_an_answer_and_is_not_shown() -> None:
    engine = make_engine(speller("hello"))
    answers, request = run_one(engine, [1], GenerationConfig())
    assert answers.texts[request, 0] == "hello"
    assert answers.tokens[request, 0][-1] == EOS and len(answers.tokens[request, 0]) == 6
    assert answers.finish[request, 0] is FinishReason.STOP


@pytest.mark.parametrize(
    ("stop", "include", "text", "reason"),
    [
        (("lo w",), False, "hel", FinishReason.STOP),
        (("lo w",), True, "hello w", FinishReason.STOP),
        (("world",), False, "hello ", FinishReason.STOP),
        (("hello worlds",), False, "hello world", FinishReason.STOP),  # withheld until the end
        (("xyz", "h"), False, "", FinishReason.STOP),
    ],
)
def test_stop_strings_never_leak(
    stop: tuple[str, ...], include: bool, text: str, reason: FinishReason
) -> None:
    config = GenerationConfig(stop=stop, include_stop_str_in_output=include)
    answers, request = run_one(make_engine(speller("hello world")), [1], config)
    assert answers.texts[request, 0] == text and answers.finish[request, 0] is reason


def test_deltas_say_what_stopped_them() -> None:
    engine = make_engine(speller("abc def"))
    for config, stop in [
        (GenerationConfig(stop=("c ",)), "c "),
        (GenerationConfig(stop_token_ids=(LETTERS.index("c"),)), LETTERS.index("c")),
        (GenerationConfig(), EOS),
        (GenerationConfig(max_new_tokens=3), None),
    ]:
        engine.add(engine.prepare([1], config))
        deltas = []
        while engine.has_work:
            deltas += [event.delta for event in engine.step()]
        assert deltas[-1] is not None and deltas[-1].matched_stop == stop


def test_withheld_text_is_not_lost_at_length_and_cancel() -> None:
    config = GenerationConfig(stop=("abcdefX",))
    engine = make_engine(speller("abcdefg"))
    short = GenerationConfig(**{**config.to_dict(), "max_new_tokens": 4})
    answers, request = run_one(engine, [1], short)
    assert answers.texts[request, 0] == "abcd"
    request = engine.prepare([1], config)
    engine.add(request)
    for _ in range(3):
        answers.take(engine.step())
    assert answers.texts[request, 0] == ""
    answers.take(engine.cancel(request))
    assert answers.texts[request, 0] == "abc"


def test_ignore_eos_runs_to_the_context() -> None:
    backend = FakeBackend(context_tokens=20, logits=scripted_logits(VOCAB, lambda prefix: EOS))
    answers, request = run_one(make_engine(backend), [1] * 5, GenerationConfig(ignore_eos=True))
    assert answers.tokens[request, 0] == [EOS] * 15
    assert answers.finish[request, 0] is FinishReason.LENGTH


def test_logprobs_and_entropy_describe_the_model() -> None:
    engine, logits = make_engine(), hashed_logits(VOCAB)
    engine.add(engine.prepare([4, 2], GenerationConfig(max_new_tokens=1, logprobs=3)))
    (event,) = engine.step()
    delta = event.delta
    assert delta is not None and delta.logprobs is not None
    row = [float(x) for x in logits([4, 2])]
    total = math.log(sum(math.exp(x) for x in row))
    nats = [x - total for x in row]
    assert delta.logprobs[0].logprob == pytest.approx(max(nats), abs=1e-5)
    assert len(delta.logprobs[0].top) == 3
    entropy = -sum(math.exp(x) * x for x in nats)
    assert delta.entropy_nats[0] == pytest.approx(entropy, abs=1e-5)
    engine.add(engine.prepare([4, 2], GenerationConfig(max_new_tokens=1)))
    (event, *_) = [*engine.step(), *engine.step()]
    assert event.delta is not None and event.delta.logprobs is None


@pytest.mark.parametrize(
    ("prompt", "config", "error", "message"),
    [
        ([], {}, RequestError, "empty"),
        ([1, VOCAB], {}, RequestError, f"token {VOCAB}, but the vocabulary has {VOCAB}"),
        ([-1], {}, RequestError, "token -1"),
        ([1] * 256, {}, PromptTooLongError, "256 tokens, but the context holds 256"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, RequestError, "logit_bias"),
        ([1], {"stop_token_ids": [VOCAB]}, RequestError, "stop_token_ids"),
    ],
)
def test_bad_requests_are_refused_before_work(
    prompt: list[int], config: dict[str, object], error: type[Exception], message: str
) -> None:
    engine = make_engine()
    with pytest.raises(error, match=message):
        engine.prepare(prompt, GenerationConfig(**config))  # type: ignore[arg-type]
    assert not engine.has_work


def test_what_memory_can_never_hold_is_refused() -> None:
    engine = make_engine(FakeBackend(kv_budget_tokens=50))
    with pytest.raises(InsufficientMemoryError, match="kv_budget_bytes"):
        engine.prepare([1] * 30, GenerationConfig(max_new_tokens=30))
    answers, request = run_one(engine, [1] * 30, GenerationConfig(ignore_eos=True))
    assert len(answers.tokens[request, 0]) == 20


def test_a_request_that_cannot_be_sampled_fails_alone() -> None:
    """It bans every token; its sibling goes with it, the neighbours do not notice."""
    ban_all = dict.fromkeys(range(VOCAB), -math.inf)
    engine, answers = make_engine(), Answers()
    good = [engine.prepare(prompt, GREEDY) for prompt in ([1, 2], [3, 4, 5])]
    bad = engine.prepare([9], GenerationConfig(logit_bias=ban_all, n=2))
    for request in (good[0], bad, good[1]):
        engine.add(request)
    run_to_end(engine, answers)
    assert isinstance(answers.errors.pop(bad), RequestError) and not answers.errors
    assert answers.tokens[good[0], 0] == tokens_alone([1, 2], GREEDY)
    assert answers.tokens[good[1], 0] == tokens_alone([3, 4, 5], GREEDY)


def test_failed_step_ends_what_ran_and_serves_the_waiting() -> None:
    backend = FakeBackend(max_slots=2, fail_at={3})
    engine, answers = make_engine(backend), Answers()
    requests = [engine.prepare([i + 1, 2], GREEDY) for i in range(4)]
    for request in requests:
        engine.add(request)
    run_to_end(engine, answers)
    assert set(answers.errors) == set(requests[:2])
    assert all("injected failure of step 3" in str(e) for e in answers.errors.values())
    for i in (2, 3):
        assert answers.tokens[requests[i], 0] == tokens_alone([i + 1, 2], GREEDY)


def test_backend_that_fails_twice_in_a_row_closes_the_engine() -> None:
    backend = FakeBackend(max_slots=2, fail_at={3, 4})
    engine, answers = make_engine(backend), Answers()
    requests = [engine.prepare([i + 1, 2], GREEDY) for i in range(6)]
    for request in requests:
        engine.add(request)
    run_to_end(engine, answers)
    assert set(answers.errors) == set(requests) and backend.closed
    assert isinstance(engine.closed_by, BackendError)
    with pytest.raises(EngineClosedError, match="step 4"):
        engine.step()


def test_unexpected_error_of_a_backend_closes_the_engine() -> None:
    def broken(prefix: object) -> None:
        raise ZeroDivisionError("no")

    backend = FakeBackend(logits=broken)  # type: ignore[arg-type]
    engine, answers = make_engine(backend), Answers()
    request = engine.prepare([1], GREEDY)
    engine.add(request)
    run_to_end(engine, answers)
    assert isinstance(answers.errors[request], BackendError)
    assert isinstance(answers.errors[request].__cause__, ZeroDivisionError)


def test_close_ends_everything_once() -> None:
    backend = FakeBackend(max_slots=2)
    engine, answers = make_engine(backend), Answers()
    requests = [engine.prepare([1, 2], GenerationConfig(n=2)) for _ in range(3)]
    for request in requests:
        engine.add(request)
    answers.take(engine.step())
    answers.take(engine.close())
    assert engine.close() == [] and backend.closed and not engine.has_work
    assert set(answers.errors) == set(requests)
    assert all(isinstance(e, EngineClosedError) for e in answers.errors.values())


def test_step_log_is_bounded_and_adds_up() -> None:
    engine, answers = make_engine(), Answers()
    engine.add(engine.prepare([1] * 10, GREEDY))
    run_to_end(engine, answers)
    first = engine.steps[0]
    assert (first.num_rows, first.num_tokens) == (1, 10)
    assert all(record.model_ms >= 0 and record.host_ms >= 0 for record in engine.steps)
    assert engine.steps.maxlen is not None


def test_failures_with_good_steps_between_are_survived() -> None:
    backend = FakeBackend(max_slots=1, fail_at={2, 5})
    engine, answers = make_engine(backend), Answers()
    requests = [engine.prepare([i + 1, 2], GREEDY) for i in range(3)]
    for request in requests:
        engine.add(request)
    run_to_end(engine, answers)
    assert set(answers.errors) == set(requests[:2]) and engine.closed_by is None
    assert answers.tokens[requests[2], 0] == tokens_alone([3, 2], GREEDY)
