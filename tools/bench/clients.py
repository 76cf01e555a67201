"""Many streaming clients of `headrace serve` at once, a quarter of them bad.

    python tools/bench/clients.py DIR [--clients 200] [--rounds 3] [--tokens 24] [--json]

A tenth of the clients leaves at random moments, a twentieth reads a byte a second, and a tenth
sends malformed JSON, oversized bodies, invalid UTF-8 and wrong types. After rounds of good ones
alone, rounds with and without the bad take turns. Exits with 1 unless the server lives and is idle
after, each accepted request has the answer that it gets alone, nonsense gets a 4xx, memory is never
3% over what it was before the bad ones came (read after each of their rounds, once the server has
been idle for some seconds), and the good clients' P99 of the time to the first token is at most
twice that of good ones alone.
"""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import common
import httpx2
import psutil
from http_clients import Tally, ask, leave, leave_unheard, read_slowly, send_nonsense

MAX_GROWTH = 0.03
MAX_RATIO = 2.0
WARM_UP_ROUNDS = 5  # of good clients alone
WAIT_S = 120.0
SETTLE_S = 5.0  # more than the server waits before it gives back what is free
ARRIVAL_S = 0.5  # within which all of them come


@dataclass(frozen=True, slots=True)
class Crowd:
    """How many clients of each kind, and how long their answers are.

    Attributes:
        good: they take the whole answer.
        leaving: half of them after some events, half whenever they like.
        slow: they take a byte a second, until the good ones are done.
        nonsense: they send one wrong request after another as long as the good ones wait.
    """

    good: int
    leaving: int
    slow: int
    nonsense: int
    tokens: int

    @classmethod
    def of(cls, clients: int, tokens: int) -> Crowd:
        leaving, slow, nonsense = clients // 10, clients // 20, clients // 10
        return cls(clients - leaving - slow - nonsense, leaving, slow, nonsense, tokens)

    def alone(self) -> Crowd:
        """The same load without the bad ones."""
        return replace(self, leaving=0, slow=0, nonsense=0)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("package", type=Path, metavar="DIR")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24, help="length of an answer")
    args = parser.parse_args()
    options = [] if args.threads is None else ["--threads", str(args.threads)]
    crowd = Crowd.of(args.clients, args.tokens)
    with served(args.package, *options) as (process, url):
        figures = asyncio.run(measure(process, url, crowd, args.rounds))
        errors = stop(process)
    failures = failures_of(figures) + ([f"the server wrote {errors!r}"] if errors else [])
    figures = common.report({**figures, "failures": failures, "passed": not failures})
    common.show(figures, table(figures) + failures, as_json=args.json)
    raise SystemExit(1 if failures else 0)


@contextmanager
def served(package: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`headrace serve` on a free port, once it is ready, and its address."""
    command = [sys.executable, "-m", "headrace.runtime.cli", "serve", str(package)]
    process = subprocess.Popen(
        [*command, "--port", "0", *options], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"ready at (http://\S+)/v1", line):
                break
        else:
            raise SystemExit("the server ended before it was ready")
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


def stop(process: subprocess.Popen[str]) -> str:
    """End the server as a user would; what it has written besides its first line."""
    process.terminate()
    _, written = process.communicate(timeout=WAIT_S)
    return written if process.returncode == 0 else f"{written} (exit {process.returncode})"


async def measure(
    process: subprocess.Popen[str], url: str, crowd: Crowd, rounds: int
) -> dict[str, Any]:
    """Rounds without the bad clients, and then with and without them. The first ones count for
    answers only."""
    rng = random.Random(0)
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    tallies: dict[str, list[Tally]] = {"good alone": [], "with bad": []}
    async with httpx2.AsyncClient(base_url=url, limits=limits, timeout=WAIT_S) as client:
        alone = await answers_alone(client, crowd)

        async def come(name: str, now: Crowd) -> None:
            tallies[name].append(await one_round(client, url, now, rng))
            await until_idle(client)

        for _ in range(WARM_UP_ROUNDS):
            await come("good alone", crowd.alone())
        rss_bytes = [await settled_bytes(process.pid)]
        for _ in range(rounds):
            await come("good alone", crowd.alone())
            await come("with bad", crowd)
            rss_bytes.append(await settled_bytes(process.pid))
        # Requests of the end get what those of the beginning got.
        again = Tally()
        await ask(client, 0, crowd.tokens, again)
        is_well = (await client.get("/health")).status_code == 200
    return {
        "clients": asdict(crowd),
        "is_well": is_well and process.poll() is None and again.answers.get(0) == alone[0],
        "rounds": [
            summary(name, of, alone, first=len(of) - rounds) for name, of in tallies.items()
        ],
        "rss_bytes": rss_bytes,
        "rss_growth": max(rss_bytes[1:]) / rss_bytes[0] - 1,
        "nonsense": statuses(tallies["with bad"]),
    }


async def answers_alone(client: httpx2.AsyncClient, crowd: Crowd) -> dict[int, str]:
    """What each request gets while there is no other."""
    tally = Tally()
    for number in range(crowd.good + crowd.leaving):
        await ask(client, number, crowd.tokens, tally)
    if tally.broken or tally.refused:
        raise SystemExit(f"alone: {tally.broken} {dict(tally.refused)}")
    return tally.answers


async def one_round(
    client: httpx2.AsyncClient, url: str, crowd: Crowd, rng: random.Random
) -> Tally:
    """All clients at once; until the good ones have their answers."""
    tally, over = Tally(), asyncio.Event()

    async def come(number: int, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        await ask(client, number, crowd.tokens, tally)

    async def go(number: int, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        if number % 2:
            await leave(client, number, crowd.tokens, rng.randint(0, crowd.tokens), tally)
        else:
            await leave_unheard(url, number, crowd.tokens, rng.expovariate(1.0))

    async with asyncio.TaskGroup() as bad:
        for number in range(crowd.good, crowd.good + crowd.leaving):
            bad.create_task(go(number, rng.uniform(0, ARRIVAL_S)))
        for number in range(crowd.slow):
            bad.create_task(read_slowly(url, number, crowd.tokens, over))
        for number in range(crowd.nonsense):
            bad.create_task(send_nonsense(url, random.Random(number), over, tally, WAIT_S))
        arrivals = [rng.uniform(0, ARRIVAL_S) for _ in range(crowd.good)]
        await asyncio.gather(*(come(number, wait) for number, wait in enumerate(arrivals)))
        over.set()
    return tally


async def until_idle(client: httpx2.AsyncClient) -> None:
    """Until nothing runs or waits.

    Raises:
        TimeoutError: something does for too long: its client has left and nobody noticed.
    """
    async with asyncio.timeout(WAIT_S):
        while True:
            lanes = (await client.get("/lanes")).json()
            if lanes.get("running") == 0 and lanes.get("waiting") == 0:
                return
            await asyncio.sleep(0.1)


async def settled_bytes(pid: int) -> int:
    """Resident memory of an idle server."""
    await asyncio.sleep(SETTLE_S)
    return int(psutil.Process(pid).memory_info().rss)


def summary(name: str, tallies: list[Tally], alone: dict[int, str], first: int) -> dict[str, Any]:
    """Rounds of one kind. Those before `first` count for answers, and not for times."""
    first_s = [seconds for tally in tallies[first:] for seconds in tally.first_s]
    given = [pair for tally in tallies for pair in tally.answers.items()]
    begun = [pair for tally in tallies for pair in tally.beginnings]
    return {
        "round": name,
        "answers": len(given),
        "other_answers": sum(alone[number] != text for number, text in given)
        + sum(not alone[number].startswith(text) for number, text in begun),
        "refused": sum((tally.refused for tally in tallies), Counter()),
        "broken": [text for tally in tallies for text in tally.broken],
        "first_token_s": [common.percentile(first_s, p) for p in (50, 99)],
    }


def statuses(tallies: list[Tally]) -> dict[str, dict[str, int]]:
    """How often each kind of nonsense got each status."""
    found: dict[str, dict[str, int]] = {}
    for (kind, status), count in sum((t.statuses for t in tallies), Counter()).items():
        found.setdefault(kind, {})[str(status)] = count
    return found


def failures_of(figures: dict[str, Any], *, timed: bool = True) -> list[str]:
    """What is not as it must be; `timed`: times and memory too."""
    failures = [] if figures["is_well"] else ["the server is not well after it"]
    for row in figures["rounds"]:
        if row["other_answers"]:
            failures.append(f"{row['round']}: {row['other_answers']} answers differ from alone")
        if row["refused"]:  # there are fewer clients than a server takes by default
            failures.append(f"{row['round']}: good requests were refused: {dict(row['refused'])}")
        failures += [f"{row['round']}: {text}" for text in row["broken"]]
    for kind, found in sorted(figures["nonsense"].items()):
        if wrong := {status for status in found if not 400 <= int(status) < 500}:
            failures.append(f"{kind} got {sorted(wrong)}")
    if timed:
        good, mixed = (row["first_token_s"][1] for row in figures["rounds"])
        if mixed > MAX_RATIO * good:
            failures.append(f"P99 of the first token is {mixed / good:.2f} times as long")
        if figures["rss_growth"] >= MAX_GROWTH:
            failures.append(f"memory grew by {figures['rss_growth']:.2%}")
    return failures


def table(figures: dict[str, Any]) -> list[str]:
    """For people."""
    lines = [", ".join(f"{count} {kind}" for kind, count in figures["clients"].items())]
    lines.append(f"{'':12}{'answers':>8}{'differ':>8}{'refused':>8}{'first token s':>15}{'P99':>7}")
    for row in figures["rounds"]:
        refused = sum(row["refused"].values())
        first, last = row["first_token_s"]
        lines.append(
            f"{row['round']:12}{row['answers']:>8}{row['other_answers']:>8}{refused:>8}"
            f"{first:>15.2f}{last:>7.2f}"
        )
    for kind, found in sorted(figures["nonsense"].items()):
        counts = ", ".join(f"{status} x {count}" for status, count in sorted(found.items()))
        lines.append(f"  {kind}: {counts}")
    before, *after = (str(size >> 20) for size in figures["rss_bytes"])
    lines.append(f"memory {before} -> {', '.join(after)} MiB ({figures['rss_growth']:+.2%})")
    return lines


if __name__ == "__main__":
    main()
