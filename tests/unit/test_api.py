from __future__ import annotations

import asyncio
import gc
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import engine_samples
import numpy as np
import pytest
from engine_samples import LETTERS, VOCAB, make_engine, make_runtime, speller

from headrace.backends.fake import FakeBackend
from headrace.runtime import EngineConfig, GenerationConfig, Runtime
from headrace.runtime.completion import TokenDelta
from headrace.runtime.core import FinishReason
from headrace.runtime.errors import (
    BackendError,
    ConfigError,
    EngineClosedError,
    HeadraceError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    TemplateError,
)
from headrace.runtime.mailbox import LoopClosedError, Mailbox
from headrace.runtime.worker import RequestHandle

FOREVER: dict[str, Any] = {"ignore_eos": True, "max_new_tokens": 10_000}
PROMPTS = ["a", "bc", "def", "a long prompt", "z" * 100, "hello world"]


@pytest.fixture(autouse=True, params=["here", "across pipes"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything holds for an isolated engine too."""
    monkeypatch.setattr(engine_samples, "across_pipes", request.param != "here")


def slow(delay_ms: float = 2.0, **options: Any) -> FakeBackend:
    """A backend with room for a long answer."""
    values: dict[str, Any] = {"context_tokens": 20_000, "max_slots": 2, **options}
    return FakeBackend(delay_ms=delay_ms, **values)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def engine_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("headrace-engine")]


def test_one_prompt_gives_one_completion() -> None:
    with make_runtime(speller("hello")) as runtime:
        completion = runtime.generate("a")
    assert completion.text == "hello" and completion.finish_reason is FinishReason.STOP
    assert (completion.prompt_tokens, completion.completion_tokens) == (1, 6)
    assert completion.matched_stop == 0 and len(completion.entropy_nats) == 6
    assert completion.logprobs is None and len(completion.choices) == 1


def test_many_prompts_keep_their_order() -> None:
    with make_runtime(max_waiting=1, max_sequences=2) as runtime:
        many = runtime.generate(PROMPTS * 5, max_new_tokens=6)
        assert isinstance(many, list)
        for prompt, completion in zip(PROMPTS * 5, many, strict=True):
            assert completion == runtime.generate(prompt, max_new_tokens=6)
        assert not runtime.generate([])


def test_token_ids_are_prompts_too() -> None:
    with make_runtime() as runtime:
        ids = [LETTERS.index(c) for c in "abc"]
        expected = runtime.generate("abc", max_new_tokens=5)
        assert runtime.generate(ids, max_new_tokens=5) == expected
        for single in (tuple(ids), np.array(ids), (i for i in ids)):
            assert runtime.generate(single, max_new_tokens=5) == expected  # type: ignore
        for several in ([ids, ids], np.array([ids, ids]), (t for t in ("abc", "abc"))):
            assert runtime.generate(several, max_new_tokens=5) == [expected, expected]  # type: ignore


def test_streamed_pieces_make_the_whole() -> None:
    with make_runtime() as runtime:
        for options in ({}, {"logprobs": 2}, {"stop": ("e", "th")}, {"temperature": 1.0}):
            config = GenerationConfig(max_new_tokens=30, seed=3, **options)
            whole = runtime.generate("abc", config)
            deltas = list(runtime.stream("abc", config))
            assert "".join(d.text for d in deltas) == whole.text
            assert tuple(i for d in deltas for i in d.token_ids) == whole.token_ids
            assert tuple(e for d in deltas for e in d.entropy_nats) == whole.entropy_nats
            assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
            assert deltas[-1].finish_reason is whole.finish_reason
            assert deltas[-1].matched_stop == whole.matched_stop
            assert (whole.logprobs is None) == ("logprobs" not in options)


def test_several_answers_to_one_prompt() -> None:
    with make_runtime() as runtime:
        config = GenerationConfig(n=3, max_new_tokens=8, temperature=1.0, seed=7, ignore_eos=True)
        completion = runtime.generate("abc", config)
        assert [choice.index for choice in completion.choices] == [0, 1, 2]
        assert len({choice.text for choice in completion.choices}) == 3
        assert completion.completion_tokens == 24
        pieces = ["", "", ""]
        for delta in runtime.stream("abc", config):
            pieces[delta.index] += delta.text
        assert pieces == [choice.text for choice in completion.choices]


def test_chat_renders_the_template() -> None:
    with make_runtime() as runtime:
        messages = [{"role": "user", "content": "hi"}]
        expected = runtime.generate("user hi assistant ", max_new_tokens=5)
        assert runtime.chat(messages, max_new_tokens=5) == expected
        streamed = runtime.chat(messages, stream=True, max_new_tokens=5)
        assert "".join(delta.text for delta in streamed) == expected.text
        with pytest.raises(RequestError, match="messages"):
            runtime.chat([])


def test_chat_needs_a_template_that_compiles() -> None:
    engine = make_engine()
    parts = make_runtime().tokenizer
    with pytest.raises(TemplateError):
        Runtime(engine, parts, chat_template="{% if %}")
    with (
        Runtime(engine, parts) as runtime,
        pytest.raises(RequestError, match="no chat template"),
    ):
        runtime.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ("", RequestError, "empty"),
        ([1, VOCAB], RequestError, f"token {VOCAB}"),
        ("a" * 300, PromptTooLongError, "300 tokens, but the context holds 256"),
        (b"abc", RequestError, "not bytes"),
        (3, RequestError, "not int"),
        (None, RequestError, "not NoneType"),
        ({"prompt": "a"}, RequestError, "not dict"),
        ([1, "a"], RequestError, "a list of token ids"),
    ],
)
def test_bad_prompts(prompt: Any, error: type[Exception], message: str) -> None:
    with make_runtime() as runtime:
        for call in (runtime.generate, runtime.submit, runtime.stream):
            with pytest.raises(error, match=message):
                call(prompt)
        assert not runtime.steps


def test_a_bad_prompt_among_many_is_named_and_nothing_starts() -> None:
    with make_runtime() as runtime:
        with pytest.raises(PromptTooLongError, match="prompt 2: the prompt has 999") as caught:
            runtime.generate(["a", "b", "c" * 999, "d"])
        assert caught.value.prompt_tokens == 999
        assert not runtime.steps


def test_options_are_checked() -> None:
    with make_runtime() as runtime:
        with pytest.raises(ConfigError, match="temperature"):
            runtime.generate("a", temperature=-1)
        with pytest.raises(ConfigError, match="max_new_tokens"):
            runtime.stream("a", max_tokens=3)
        config = GenerationConfig(max_new_tokens=3, ignore_eos=True)
        assert runtime.generate("a", config, max_new_tokens=2).completion_tokens == 2
        assert config.max_new_tokens == 3
    default = GenerationConfig(max_new_tokens=4, ignore_eos=True)
    with Runtime(make_engine(), make_runtime().tokenizer, default_config=default) as runtime:
        assert runtime.generate("a").completion_tokens == 4
        assert runtime.generate("a", max_new_tokens=2).completion_tokens == 2


def test_closing_a_stream_cancels_it() -> None:
    with make_runtime(slow()) as runtime:
        stream = runtime.stream("a", **FOREVER)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        wait_until(lambda: runtime._engine.num_running == 0)
        for _ in runtime.stream("a", **FOREVER):
            break  # dropping it does, too
        gc.collect()
        wait_until(lambda: runtime._engine.num_running == 0)


def test_handles() -> None:
    with make_runtime(slow()) as runtime:
        handle = runtime.submit("a", **FOREVER)
        with pytest.raises(TimeoutError, match="not done"):
            handle.result(timeout=0.01)
        first = next(iter(handle))
        runtime.cancel(handle.request_id)
        completion = handle.result(timeout=20)
        assert handle.done and completion.finish_reason is FinishReason.CANCELLED
        assert completion.token_ids[:1] == first.token_ids
        rest = list(handle)
        assert rest[-1].finish_reason is FinishReason.CANCELLED and list(handle) == []
        handle.cancel()
        runtime.cancel(handle)
        runtime.cancel(12345)


def test_pieces_are_called_back() -> None:
    with make_runtime() as runtime:
        for prompt in ("abc", [{"role": "user", "content": "hi"}]):
            pieces: queue.SimpleQueue[TokenDelta | None] = queue.SimpleQueue()
            handle = runtime.submit(prompt, max_new_tokens=9, on_delta=pieces.put)
            heard = list(iter(partial(pieces.get, timeout=20), None))
            assert handle.done and "".join(d.text for d in heard if d) == handle.result(0).text
        expected = runtime.chat([{"role": "user", "content": "hi"}], max_new_tokens=9)
        assert handle.result(0) == expected


def test_a_callback_that_fails_cancels_its_request_alone() -> None:
    def fail(delta: object) -> None:
        raise ZeroDivisionError

    with make_runtime(slow()) as runtime:
        handle = runtime.submit("a", on_delta=fail, **FOREVER)
        assert handle.result(20).finish_reason is FinishReason.CANCELLED
        assert runtime.generate("b", max_new_tokens=3, ignore_eos=True).completion_tokens == 3


def test_the_queue_is_bounded() -> None:
    with make_runtime(slow(), max_sequences=2, max_waiting=3) as runtime:
        handles = [runtime.submit("a", **FOREVER) for _ in range(5)]
        with pytest.raises(QueueFullError, match="try again later"):
            runtime.submit("a")
        with pytest.raises(QueueFullError):
            next(runtime.stream("a"))
        waiting = threading.Thread(target=runtime.generate, args=(["a"] * 9,), daemon=True)
        waiting.start()  # a call that blocks anyway waits for room
        handles[4].cancel()
        handles[4].result(20)
        for handle in handles:
            handle.cancel()
        waiting.join(20)
        assert not waiting.is_alive()
        assert runtime.submit("a", max_new_tokens=2).result(20).completion_tokens == 2


def test_no_queue_at_all() -> None:
    with make_runtime(slow(), max_sequences=1, max_waiting=0) as runtime:
        handle = runtime.submit("a", **FOREVER)
        with pytest.raises(QueueFullError):
            runtime.submit("a")
        handle.cancel()
        handle.result(20)
        assert len(runtime.generate(["a"] * 4, max_new_tokens=2)) == 4


def test_whoever_hears_of_an_end_may_submit_the_next() -> None:
    with make_runtime(FakeBackend(max_slots=1), max_waiting=0) as runtime:
        worker, engine = runtime._worker, runtime._engine
        outcomes: list[RequestHandle | Exception] = []

        def submit_next(delta: object) -> None:
            if delta is None and len(outcomes) < 5:
                request = engine.prepare([1, 2], GenerationConfig(max_new_tokens=2))
                try:
                    outcomes.append(worker.submit(request, listener=submit_next))
                except QueueFullError as error:
                    outcomes.append(error)

        submit_next(None)
        wait_until(lambda: len(outcomes) == 5)
        assert all(isinstance(o, RequestHandle) for o in outcomes)


def test_close_while_busy_fails_what_is_not_done() -> None:
    before = len(engine_threads())
    backend = slow()
    runtime = make_runtime(backend)
    handles = [runtime.submit("a", **FOREVER) for _ in range(5)]
    caught: list[Exception] = []

    def generate() -> None:
        try:
            runtime.generate(["a"] * 10, **FOREVER)
        except EngineClosedError as error:
            caught.append(error)

    threads = [threading.Thread(target=generate) for _ in range(3)]
    for thread in threads:
        thread.start()
    next(iter(handles[0]))
    closers = [threading.Thread(target=runtime.close) for _ in range(3)]
    for thread in closers:
        thread.start()
    for thread in closers + threads:
        thread.join(20)
        assert not thread.is_alive()
    runtime.close()
    assert runtime.closed and backend.closed and len(caught) == 3
    for handle in handles:
        with pytest.raises(EngineClosedError, match="the runtime was closed"):
            handle.result(0)
    with pytest.raises(EngineClosedError):
        list(handles[0])
    for call in (runtime.generate, runtime.submit, lambda p: next(runtime.stream(p))):
        with pytest.raises(EngineClosedError):
            call("a")
    assert len(engine_threads()) == before


def test_broken_backend_fails_everybody_and_says_why() -> None:
    runtime = make_runtime(slow(fail_at={2, 3}))
    handles = [runtime.submit("a", **FOREVER) for _ in range(4)]
    for handle in handles:
        with pytest.raises(HeadraceError, match="injected failure of step"):
            handle.result(20)
    wait_until(lambda: runtime.closed)
    with pytest.raises(EngineClosedError, match="injected failure of step 3"):
        runtime.generate("a")
    runtime.close()


def test_one_failed_step_is_survived() -> None:
    with make_runtime(slow(fail_at={2})) as runtime:
        with pytest.raises(BackendError, match="step 2"):
            runtime.generate("a", **FOREVER)
        assert runtime.generate("a", max_new_tokens=3, ignore_eos=True).completion_tokens == 3


@pytest.mark.parametrize("method", ["step", "add"])
def test_our_own_mistake_does_not_hang_anybody(method: str) -> None:
    runtime = make_runtime(slow())
    setattr(runtime._engine, method, None)
    with pytest.raises(HeadraceError, match="stopped after an error"):
        runtime.generate("a")
    runtime.close()


def test_dropping_a_runtime_ends_its_thread() -> None:
    backend = slow()
    runtime = make_runtime(backend)
    runtime.generate("a", max_new_tokens=2)
    del runtime
    gc.collect()
    wait_until(lambda: backend.closed)


def test_a_handle_keeps_its_runtime() -> None:
    handle = make_runtime(slow()).submit("a", max_new_tokens=4, ignore_eos=True)
    gc.collect()
    assert handle.result(20).completion_tokens == 4


def test_idle_runtime_uses_no_cpu() -> None:
    with make_runtime() as runtime:
        runtime.generate("a", max_new_tokens=2)
        steps = len(runtime._engine.steps)
        wait_until(lambda: not runtime._engine.has_work)
        calls = []
        schedule = runtime._engine._scheduler.schedule
        runtime._engine._scheduler.schedule = lambda: calls.append(1) or schedule()  # type: ignore
        time.sleep(0.05)
        assert not calls and len(runtime._engine.steps) - steps <= 1


@pytest.mark.parametrize("kept_bytes", [0, None])
def test_many_threads_with_random_cancels(kept_bytes: int | None) -> None:
    """Everybody gets what they get alone, whatever the others do; nothing is left behind."""
    backend = FakeBackend(max_slots=4)
    with make_runtime(backend, max_chunk_tokens=8, prefix_cache_bytes=kept_bytes) as runtime:
        config = GenerationConfig(max_new_tokens=12, temperature=0.8, seed=1, ignore_eos=True)
        expected = {
            p: c.text for p, c in zip(PROMPTS, runtime.generate(PROMPTS, config), strict=True)
        }
        failures: list[str] = []

        def work(number: int) -> None:
            choose = random.Random(number)
            for _ in range(12):
                prompt, kind = choose.choice(PROMPTS), choose.randrange(4)
                if kind == 0:
                    text = runtime.generate(prompt, config).text
                elif kind == 1:
                    text = "".join(delta.text for delta in runtime.stream(prompt, config))
                elif kind == 2:
                    handle: RequestHandle = runtime.submit(prompt, config)
                    handle.cancel()
                    text = handle.result(20).text
                    if not expected[prompt].startswith(text):
                        failures.append(text)
                    continue
                else:
                    for delta in runtime.stream(prompt, config):
                        if not expected[prompt].startswith(delta.text):
                            failures.append(delta.text)
                        break
                    continue
                if text != expected[prompt]:
                    failures.append(text)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert not failures
        wait_until(lambda: not runtime._engine.has_work)
        runtime._engine.check_integrity()
        wait_until(lambda: kept_bytes is None or backend.held_tokens == 0)
        assert not runtime._worker._handles
        assert runtime._worker._room == runtime._engine.config.max_waiting + 4


def test_async_twins() -> None:
    async def main(runtime: Runtime) -> None:
        messages = [{"role": "user", "content": "hi"}]
        one = await runtime.agenerate("abc", max_new_tokens=5)
        assert one == runtime.generate("abc", max_new_tokens=5)
        many = await runtime.agenerate(PROMPTS * 3, max_new_tokens=5)
        assert many == runtime.generate(PROMPTS * 3, max_new_tokens=5)
        pieces = [delta async for delta in runtime.astream("abc", max_new_tokens=5)]
        assert pieces == list(runtime.stream("abc", max_new_tokens=5))
        assert await runtime.achat(messages, max_new_tokens=5) == runtime.chat(
            messages, max_new_tokens=5
        )
        streamed = await runtime.achat(messages, stream=True, max_new_tokens=5)
        assert [d async for d in streamed] == list(
            runtime.chat(messages, stream=True, max_new_tokens=5)
        )
        with pytest.raises(PromptTooLongError, match="prompt 1"):
            await runtime.agenerate(["a", "b" * 999])
        with pytest.raises(RequestError):
            async for _ in runtime.astream(""):
                pass
        results = await asyncio.gather(
            *(runtime.agenerate(p, max_new_tokens=5) for p in PROMPTS * 4)
        )
        assert results == many[:6] * 4

    # Without drafts a piece is a token; with them, what fits depends on what was seen before.
    with make_runtime(max_waiting=2, max_sequences=2, max_draft_tokens=0) as runtime:
        asyncio.run(main(runtime))


def test_cancelling_a_task_cancels_its_requests() -> None:
    async def main(runtime: Runtime) -> None:
        async def consume() -> None:
            async for _ in runtime.astream("a", **FOREVER):
                pass

        for work in (consume(), runtime.agenerate(["a"] * 9, **FOREVER)):
            task = asyncio.ensure_future(work)
            while not runtime._engine.num_running:
                await asyncio.sleep(0.002)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while runtime._engine.has_work:
                await asyncio.sleep(0.002)

    with make_runtime(slow(), max_waiting=1) as runtime:
        asyncio.run(asyncio.wait_for(main(runtime), 30))


def test_async_errors_arrive() -> None:
    async def main(runtime: Runtime) -> None:
        with pytest.raises(BackendError, match="step 1"):
            await runtime.agenerate("a", **FOREVER)
        asyncio.get_running_loop().call_later(0.05, runtime.cancel, 0)
        stream = runtime.astream("a", **FOREVER)
        await anext(stream)
        await asyncio.to_thread(runtime.close)
        with pytest.raises(EngineClosedError):
            async for _ in stream:
                pass

    asyncio.run(main(make_runtime(slow(fail_at={1}))))


def test_a_loop_that_went_away_does_not_disturb_the_others() -> None:
    with make_runtime(slow()) as runtime:
        loop = asyncio.new_event_loop()
        stream = runtime.astream("a", **FOREVER)
        loop.run_until_complete(anext(stream))
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
        assert runtime.generate("b", max_new_tokens=3, ignore_eos=True).completion_tokens == 3
        wait_until(lambda: not runtime._engine.has_work)


def test_two_runtimes_do_not_meet() -> None:
    with make_runtime() as one, make_runtime(speller("hello")) as other:
        assert other.generate("a").text == "hello" != one.generate("a").text
        one.close()
        assert other.generate("a").text == "hello"


def test_exit_without_close_is_clean() -> None:
    code = """
import sys; sys.path[:0] = sys.argv[2:]
import engine_samples
from engine_samples import make_runtime
from headrace.backends.fake import FakeBackend
engine_samples.across_pipes = bool(sys.argv[1])
runtime = make_runtime(FakeBackend(context_tokens=9000, delay_ms=1))
handle = runtime.submit("a", ignore_eos=True)
next(iter(handle))
"""
    across_pipes = "yes" if engine_samples.across_pipes else ""
    unit = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, across_pipes, unit, unit.parent],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_importing_a_leaf_loads_nothing_else() -> None:
    code = (
        "import sys, headrace.runtime.core; "
        "loaded = {m for m in sys.modules if m.startswith('headrace.')}; "
        "assert loaded == {'headrace.runtime', 'headrace.runtime.core'}, loaded; "
        "import headrace.runtime as r; "
        "r.GenerationConfig, r.EngineConfig; "
        "assert 'numpy' not in sys.modules and 'headrace.runtime.api' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="Nothing"):
        __import__("headrace.runtime").runtime.Nothing  # noqa: B018
    assert EngineConfig is __import__("headrace.runtime").runtime.EngineConfig


def test_a_loop_is_woken_once_for_many_calls() -> None:
    async def main() -> None:
        loop, mailbox = asyncio.get_running_loop(), Mailbox(asyncio.get_running_loop())
        seen: list[int] = []
        wakes: list[int] = []
        wake = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *a: wakes.append(1) or wake(*a)  # type: ignore
        for i in range(10):
            mailbox.post(partial(seen.append, i))
        assert len(wakes) == 1 and not seen
        await asyncio.sleep(0)
        assert seen == list(range(10))
        mailbox.post(partial(seen.append, 10))
        await asyncio.sleep(0)
        assert seen[-1] == 10 and len(wakes) == 2
        loop.call_soon_threadsafe = wake  # type: ignore[method-assign]

    asyncio.run(main())
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop)
    loop.close()
    for _ in range(2):
        with pytest.raises(LoopClosedError):
            mailbox.post(lambda: None)
    del loop
    gc.collect()
    with pytest.raises(LoopClosedError):
        mailbox.post(lambda: None)


def test_a_loop_closed_before_it_looked_is_noticed() -> None:
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop)
    mailbox.post(lambda: None)
    loop.close()
    with pytest.raises(LoopClosedError):
        mailbox.post(lambda: None)


def test_a_loop_closed_amid_answers_is_no_fault_to_report(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def leave(runtime: Runtime) -> None:
        config = GenerationConfig(max_new_tokens=30, ignore_eos=True)
        prompts = ["a"] * 12  # more than there is room for: some wait for that
        answers = asyncio.ensure_future(runtime.agenerate(prompts, config))
        while not runtime.steps:
            await asyncio.sleep(0.001)
        assert not answers.done()

    with make_runtime(FakeBackend(max_slots=4, delay_ms=1), max_waiting=1) as runtime:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(leave(runtime))
        loop.close()  # nothing was cancelled
        assert runtime.generate("b", max_new_tokens=200, ignore_eos=True).text  # outlasts them
    assert "listener" not in caplog.text


@pytest.mark.parametrize("in_loop", [False, True])
def test_prompts_given_together_begin_together(in_loop: bool) -> None:
    prompts = [letter * 5 for letter in "abcdefghij"]
    with make_runtime(FakeBackend(max_slots=8), max_waiting=0) as runtime:
        config = GenerationConfig(max_new_tokens=3, ignore_eos=True)
        if in_loop:
            asyncio.run(runtime.agenerate(prompts, config))
        else:
            runtime.generate(prompts, config)
        assert runtime.steps[0].num_rows == 8
