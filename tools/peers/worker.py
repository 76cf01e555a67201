"""The worker's side of the comparison: one process, one model, JSON lines on stdin and stdout.

    {"op": "load", "model": PATH, "threads": 2, "max_batch": 8, "context_tokens": 192,
     "options": {}}                              -> {"load_s": s, "about": {"precision": ...}}
    {"op": "run", "prompts": [[id, ...], ...], "new_tokens": 64}
                                 -> {"wall_s": s, "cpu_s": s, "token_ids": [[id, ...], ...]}
    {"op": "serve", "arrivals": [{"at_s": s, "prompt": [id, ...], "new_tokens": 16}, ...]}
                                 -> {"wall_s": s, "cpu_s": s, "done_s": [s, ...]}
    {"op": "score", "token_ids": [id, ...], "file": PATH}
                                 -> {"exposed": true}, and float32 [tokens, vocabulary] as .npy
    {"op": "quit"}                               -> the end

Every answer also tells `peak_bytes`, the most memory that the worker has held so far (null where
untold), `idle_s`, how long the worker waited for the request, and `idle_cpu_s`,
the CPU time that all of its threads used meanwhile: a worker that spins while it waits would slow
down the others. A request that fails is answered by {"error": reason}.

The clock is read here, in one place for all peers. The time to first token is the wall time of a
run with one new token.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from peers.arrivals import Arrival, serve_in_batches

TokenIds = list[int]


class Adapter(Protocol):
    """What a peer has to be able to do.

    It may also have `serve(arrivals) -> list[float]`, where it takes requests while others run
    (seconds from the start to the end of each), and `logits(token_ids)`, float32
    [tokens, vocabulary], where it shows them.
    """

    def load(
        self,
        model: Path,
        *,
        threads: int,
        max_batch: int,
        context_tokens: int,
        options: Mapping[str, str],
    ) -> Mapping[str, str]:
        """Get ready to decode; returns what a reader of the table should know."""

    def generate(self, prompts: Sequence[TokenIds], new_tokens: int) -> list[TokenIds]:
        """Decode all prompts greedily, ignoring EOS; returns the new tokens of each."""


def serve(adapter: Adapter) -> None:
    """Answer requests until `quit` or the end of stdin.

    Native libraries print to file descriptor 1, so the answers get one of their own and 1 goes
    where 2 goes.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answer_all(adapter, requests, answers)


def answer_all(adapter: Adapter, requests: IO[str], answers: IO[str]) -> None:
    """`serve` on given streams."""
    max_batch = 1
    operations: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "load": lambda request: _load(adapter, request),
        "run": lambda request: _run(adapter, request),
        "serve": lambda request: _serve(adapter, request, max_batch),
        "score": lambda request: _score(adapter, request),
    }
    waits_since, cpu_then = time.perf_counter(), time.process_time()
    while line := requests.readline():
        idle = {
            "idle_s": time.perf_counter() - waits_since,
            "idle_cpu_s": time.process_time() - cpu_then,
        }
        request = json.loads(line)
        if request["op"] == "quit":
            return
        max_batch = request.get("max_batch", max_batch)
        try:
            answer = operations[request["op"]](request)
        except Exception as error:  # whatever a peer raises becomes a row of the table
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps({**answer, **idle, "peak_bytes": _peak_bytes()}) + "\n")
        answers.flush()
        waits_since, cpu_then = time.perf_counter(), time.process_time()


def _load(adapter: Adapter, request: Mapping[str, Any]) -> dict[str, Any]:
    start = time.perf_counter()
    about = adapter.load(
        Path(request["model"]),
        threads=request["threads"],
        max_batch=request["max_batch"],
        context_tokens=request["context_tokens"],
        options=request["options"],
    )
    return {"load_s": time.perf_counter() - start, "about": dict(about)}


def _run(adapter: Adapter, request: Mapping[str, Any]) -> dict[str, Any]:
    prompts, new_tokens = request["prompts"], request["new_tokens"]
    start, cpu_then = time.perf_counter(), time.process_time()
    token_ids = adapter.generate(prompts, new_tokens)
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_then
    lengths = [len(ids) for ids in token_ids]
    if lengths != [new_tokens] * len(prompts):
        raise ValueError(f"asked for {new_tokens} tokens of {len(prompts)} prompts, got {lengths}")
    plain = [[int(i) for i in ids] for ids in token_ids]
    return {"wall_s": wall_s, "cpu_s": cpu_s, "token_ids": plain}


def _serve(adapter: Adapter, request: Mapping[str, Any], max_batch: int) -> dict[str, Any]:
    arrivals = [Arrival(**arrival) for arrival in request["arrivals"]]
    start, cpu_then = time.perf_counter(), time.process_time()
    serve_them = getattr(adapter, "serve", None)
    if serve_them is None:
        done_s = serve_in_batches(adapter.generate, arrivals, max_batch)
    else:
        done_s = serve_them(arrivals)
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_then
    return {"wall_s": wall_s, "cpu_s": cpu_s, "done_s": list(done_s)}


def _score(adapter: Adapter, request: Mapping[str, Any]) -> dict[str, Any]:
    logits = getattr(adapter, "logits", None)
    if logits is None:
        return {"exposed": False}
    import numpy as np  # the driver reads this file too, and may have no numpy

    np.save(request["file"], np.asarray(logits(request["token_ids"]), dtype=np.float32))
    return {"exposed": True}


def _peak_bytes() -> int | None:
    """Of this process's memory so far; None where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text("utf-8")
    except OSError:
        return None
    kib = next((line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")), None)
    return int(kib) * 1024 if kib else None
