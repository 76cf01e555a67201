"""Many clients at once, some of whom leave or send nonsense: the others get what they get alone."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import httpx2
import openai
from server_samples import WAIT_S, Serving, fake_model, serving
from test_server_clients import is_idle, until

from headrace.backends.fake import FakeBackend

NUM_CLIENTS = 60
PROMPTS = ["a", "hello", "the quick brown fox", "x" * 50]
NONSENSE = [
    b"{",
    b"\xff\xfe",
    b'{"prompt": 5}',
    b'{"prompt": "a", "n": 0}',
    b"[" * 20_000,
    b"a" * 9000,
]


def options_of(number: int) -> dict[str, Any]:
    """What a client asks for: its own prompt, seed and length."""
    return {
        "prompt": PROMPTS[number % len(PROMPTS)],
        "max_tokens": 10 + number % 40,
        "temperature": 1.0,
        "seed": number,
        "n": 1 + number % 2,
    }


async def ask(client: openai.AsyncOpenAI, number: int) -> list[str]:
    """Texts of the answers, streamed; tried again while the server is full."""
    options = options_of(number)
    texts = [""] * options["n"]
    events = await client.completions.create(model="fake", stream=True, **options)
    async for event in events:
        texts[event.choices[0].index] += event.choices[0].text
    return texts


async def leave(client: httpx2.AsyncClient, number: int) -> None:
    """Ask for a long answer and go after some events."""
    body = {**options_of(number), "max_tokens": 180, "ignore_eos": True, "stream": True}
    events_left = number % 5
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for _ in answer.aiter_lines():
            if events_left == 0:
                return
            events_left -= 1


async def send_nonsense(client: httpx2.AsyncClient, number: int) -> None:
    answer = await client.post("/v1/completions", content=NONSENSE[number % len(NONSENSE)])
    assert 400 <= answer.status_code < 500


async def crowd(running: Serving) -> dict[int, list[str]]:
    """All of them at once, in an order that chance decides; the answers of those who stay."""
    answers: dict[int, list[str]] = {}

    async def stay(client: openai.AsyncOpenAI, number: int) -> None:
        answers[number] = await ask(client, number)

    limits = httpx2.Limits(max_connections=None)
    async with (
        running.async_client(max_retries=100, timeout=WAIT_S) as good,
        httpx2.AsyncClient(base_url=running.url, timeout=WAIT_S, limits=limits) as bad,
    ):
        work = [stay(good, number) for number in range(NUM_CLIENTS)]
        work += [leave(bad, number) for number in range(NUM_CLIENTS // 5)]
        work += [send_nonsense(bad, number) for number in range(NUM_CLIENTS // 5)]
        random.Random(7).shuffle(work)
        await asyncio.gather(*work)
    return answers


def test_a_crowd() -> None:
    backend = FakeBackend(max_slots=16, delay_ms=0.5)
    loader = fake_model(backend)
    with serving({"fake": loader}, max_requests=48, max_body_bytes=8192) as running:
        runtime = running.runtime("fake")
        alone = {
            number: [
                choice.text
                for choice in runtime.generate(
                    options["prompt"],
                    max_new_tokens=options["max_tokens"],
                    **{name: options[name] for name in ("temperature", "seed", "n")},
                ).choices
            ]
            for number in range(NUM_CLIENTS)
            if (options := options_of(number))
        }
        threads = None
        for _ in range(2):
            assert asyncio.run(crowd(running)) == alone
            until(lambda: is_idle(running) and runtime.occupancy == (0, 0))
            runtime._engine.check_integrity()
            until(lambda: len(running.server.server_state.tasks) <= 1)
            until(lambda: len(running.server.server_state.connections) <= 1)  # ours
            # The second round needs nothing that the first has not left: threads are reused.
            assert threads is None or threading.active_count() <= threads
            threads = threading.active_count()
        assert not runtime._worker._handles
