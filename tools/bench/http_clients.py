"""Clients of a server, good and bad ones, for `clients.py`.

A good one streams an answer. Bad ones leave, read a byte a second, or send what is no request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx2

PATH = "/v1/completions"
OPENINGS = (
    "Once upon a time",
    "The capital of France is",
    "To bake bread you need",
    "Rain in spring",
    "A list of rivers:",
    "He opened the door and",
    "In 1969",
    "The recipe",
)
READ_S = 1.0  # between two bytes of a slow reader
PAUSE_S = (0.2, 1.0)  # between two pieces of nonsense from one client
OVERSIZED_BYTES = 3 << 20

_DEEP = b"[" * 100_000
_WRONG_BODIES = {
    "cut JSON": b'{"prompt": "a", "max_tok',
    "no JSON": b"prompt=a&max_tokens=3",
    "deep JSON": b'{"prompt": ' + _DEEP,
    "invalid UTF-8": b'{"prompt": "\xff\xfe\xc0"}',
    "lone surrogate": b'{"prompt": "\\ud800"}',
    "prompt a number": b'{"prompt": 5}',
    "n a text": b'{"prompt": "a", "n": "many"}',
    "max_tokens below 0": b'{"prompt": "a", "max_tokens": -1}',
    "stream a list": b'{"prompt": "a", "stream": []}',
    "token ids out of range": b'{"prompt": [-1, 99999999]}',
    "a list": b"[1, 2]",
    "oversized": b'{"prompt": "' + b"a" * OVERSIZED_BYTES + b'"}',
}


@dataclass(slots=True)
class Tally:
    """What clients saw.

    Attributes:
        answers: request number to text, of those that were read to their end.
        first_s: seconds to the first text of each of them.
        beginnings: request number and what was read of it before the client left.
        statuses: kind of nonsense and status; 0 where the connection ended without one.
        refused: statuses of good requests that were refused.
        broken: good requests that ended without their `[DONE]`, and why.
    """

    answers: dict[int, str] = field(default_factory=dict)
    first_s: list[float] = field(default_factory=list)
    beginnings: list[tuple[int, str]] = field(default_factory=list)
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    refused: Counter[int] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)


def body_of(number: int, tokens: int) -> dict[str, Any]:
    """A request of its own for each number, streamed, at a temperature and with a seed."""
    return {
        "prompt": f"{OPENINGS[number % len(OPENINGS)]} {number}",
        "max_tokens": tokens,
        "temperature": 0.8,
        "seed": number,
        "stream": True,
    }


async def ask(client: httpx2.AsyncClient, number: int, tokens: int, tally: Tally) -> None:
    """Stream an answer to its end."""
    start, first_s, text = time.perf_counter(), math.nan, ""
    is_done = False
    try:
        async with client.stream("POST", PATH, json=body_of(number, tokens)) as answer:
            if answer.status_code != 200:
                tally.refused[answer.status_code] += 1
                return
            async for line in answer.aiter_lines():
                text += piece_of(line)
                if text and math.isnan(first_s):
                    first_s = time.perf_counter() - start
                is_done = is_done or line == "data: [DONE]"
    except httpx2.HTTPError as error:
        tally.broken.append(f"request {number}: {error!r}")
        return
    if not is_done:
        tally.broken.append(f"request {number} ended after {text!r}")
        return
    tally.answers[number] = text
    if text:
        tally.first_s.append(first_s)


async def leave(
    client: httpx2.AsyncClient, number: int, tokens: int, events: int, tally: Tally
) -> None:
    """Ask, and go after some events: also before the first."""
    text = ""
    try:
        async with client.stream("POST", PATH, json=body_of(number, tokens)) as answer:
            async for line in answer.aiter_lines():
                text += piece_of(line)
                if (events := events - 1) < 0:
                    break
    except httpx2.HTTPError as error:
        tally.broken.append(f"request {number}, before its client left: {error!r}")
    tally.beginnings.append((number, text))


async def leave_unheard(url: str, number: int, tokens: int, after_s: float) -> None:
    """Ask, and reset the connection at some moment, whatever the server does then."""
    host, port = address_of(url)
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection(host, port)
        writer.write(request(json.dumps(body_of(number, tokens)).encode()))
        await asyncio.sleep(after_s)
        writer.transport.abort()


async def read_slowly(url: str, number: int, tokens: int, until: asyncio.Event) -> None:
    """Ask for an answer with much to it, and take a byte a second of it."""
    loop = asyncio.get_running_loop()
    body = {**body_of(number, tokens), "logprobs": 5}
    with socket.socket() as taken, contextlib.suppress(OSError):
        taken.setblocking(False)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the system's least
        await loop.sock_connect(taken, address_of(url))
        await loop.sock_sendall(taken, request(json.dumps(body).encode()))
        while not until.is_set() and await loop.sock_recv(taken, 1):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(until.wait(), READ_S)


async def send_nonsense(
    url: str, rng: random.Random, until: asyncio.Event, tally: Tally, wait_s: float
) -> None:
    """One wrong request after another, each on a connection of its own."""
    sent = nonsense()
    while True:
        kind = rng.choice(sorted(sent))
        try:
            status = await asyncio.wait_for(status_of(url, sent[kind]), wait_s)
        except (OSError, TimeoutError):
            status = 0
        tally.statuses[kind, status] += 1
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(until.wait(), rng.uniform(*PAUSE_S))
        if until.is_set():
            return


def nonsense() -> dict[str, bytes]:
    """What is no request, by what is wrong with it: all bytes that are sent."""
    piece = b"a" * 65_536
    return {
        **{kind: request(body) for kind, body in _WRONG_BODIES.items()},
        "oversized in pieces": request(
            b"%x\r\n%s\r\n" % (len(piece), piece) * (OVERSIZED_BYTES // len(piece)),
            "Transfer-Encoding: chunked",
        ),
        "oversized by its word": request(b"{", "Content-Length: 99999999999"),
        "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        "long header": request(b"{}", f"Content-Length: 2\r\nX-Long: {'a' * 200_000}"),
        "wrong length": request(b"{}", "Content-Length: -5"),
    }


def request(body: bytes, length: str | None = None) -> bytes:
    """A POST as it is sent."""
    head = [f"POST {PATH} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    head.append(length or f"Content-Length: {len(body)}")
    return "\r\n".join([*head, "", ""]).encode() + body


async def status_of(url: str, sent: bytes) -> int:
    """The status that comes back. Whoever reads may stop reading once it has answered.

    Raises:
        OSError: none came.
    """
    reader, writer = await asyncio.open_connection(*address_of(url))
    writer.write(sent)
    try:
        line = await reader.readline()
    finally:
        writer.transport.abort()
    return int(line.split()[1]) if line.startswith(b"HTTP/1.1 ") else 0


def piece_of(line: str) -> str:
    """The text in a line of a stream."""
    if not line.startswith("data: {"):
        return ""
    return "".join(choice["text"] for choice in json.loads(line[6:]).get("choices", ()))


def address_of(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname and parts.port
    return parts.hostname, parts.port
