"""All measurements of a run, one kind after the other, peers taking turns in each."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from peers import environments
from peers.arrivals import LONGEST_TOKENS, draw_arrivals
from peers.client import Client
from peers.environments import ROOT, PeerError
from peers.machine import Machine
from peers.measure import RUN_TIMEOUT_S, SETTLE_S, Plan, Runner, measure, windows
from peers.results import LoadSample, StartSample
from peers.specs import PEERS, REFERENCE, TRUTH, Peer
from peers.starting import model_of, start

KINDS = ("decode", "prefill", "load", "fidelity", "start")
PROMPT_IDS = ROOT / "tools" / "peers" / "prompt_ids.json"
Say = Callable[[str], None]
TokenIds = list[int]
_START_SEQUENCES = 4  # in the run whose memory is told


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of everything; lengths in tokens.

    Attributes:
        requests, requests_per_s: of the load; they come faster than any peer serves them.
        score_tokens: of the text that fidelity is measured on.
    """

    batches: tuple[int, ...] = (1, 4, 16)
    prompt_tokens: int = 128
    new_tokens: int = 64
    repeats: int = 3
    prefill_tokens: tuple[int, ...] = (128, 512, 2048)
    requests: int = 48
    requests_per_s: float = 8.0
    load_slots: int = 16
    score_tokens: int = 512

    def room(self, kinds: Sequence[str]) -> Plan:
        """What workers that measure these kinds have to have room for."""
        longest = [self.prompt_tokens + self.new_tokens]
        batches = self.batches if "decode" in kinds else (1,)
        if "prefill" in kinds:
            longest += [tokens + 1 for tokens in self.prefill_tokens]
        if "fidelity" in kinds:
            longest.append(self.score_tokens + 1)
        if "load" in kinds:
            batches = (*batches, self.load_slots)
            longest.append(LONGEST_TOKENS)
        return Plan(batches, max(longest) - self.new_tokens, self.new_tokens, self.repeats)


def run_all(
    clients: Mapping[str, Runner],
    settings: Settings,
    kinds: Sequence[str],
    text_ids: Sequence[int],
    say: Say,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Measure what needs loaded workers.

    Returns:
        fields of `Result`, and why peers failed on the way.
    """
    found: dict[str, Any] = {}
    failures: dict[str, str] = {}

    def left(drafts: bool) -> dict[str, Runner]:
        keep = {n: c for n, c in clients.items() if n not in failures}
        return {n: c for n, c in keep.items() if drafts or not PEERS[n].drafts}

    if "decode" in kinds:
        sizes = (settings.batches, settings.prompt_tokens, settings.new_tokens)
        decode, failed = measure(left(True), Plan(*sizes, settings.repeats), text_ids, say)
        found["decode"] = tuple(decode)
        failures |= failed
    if "prefill" in kinds:
        prefill = []
        for tokens in settings.prefill_tokens:
            plan = Plan((1,), tokens, 1, settings.repeats)
            samples, failed = measure(left(False), plan, text_ids, say)
            prefill += [dataclasses.replace(s, prompt_tokens=tokens) for s in samples]
            failures |= failed
        found["prefill"] = tuple(prefill)
    if "load" in kinds:
        found["loads"] = tuple(serve_load(left(False), settings, text_ids, failures, say))
    if "fidelity" in kinds:
        found["divergence"] = diverge(left(False), text_ids[: settings.score_tokens], say)
    return found, failures


def serve_load(
    runners: Mapping[str, Runner],
    settings: Settings,
    text_ids: Sequence[int],
    failures: dict[str, str],
    say: Say,
    *,
    settle_s: float = SETTLE_S,
) -> list[LoadSample]:
    """Rounds of the same requests for all; adds to `failures` those that do not finish."""
    samples = []
    for number in range(1, settings.repeats + 1):
        say(f"{settings.requests} requests at random times, round {number}")
        arrivals = draw_arrivals(text_ids, settings.requests, settings.requests_per_s, seed=number)
        request = {"op": "serve", "arrivals": [dataclasses.asdict(a) for a in arrivals]}
        for peer, runner in runners.items():
            if peer in failures:
                continue
            time.sleep(settle_s)
            try:
                answer = runner.request(request, RUN_TIMEOUT_S)
            except PeerError as error:
                failures[peer] = f"under load: {error}"
                say(f"{peer} {failures[peer]}")
                continue
            latencies = [d - a.at_s for d, a in zip(answer["done_s"], arrivals, strict=True)]
            tokens = sum(a.new_tokens for a in arrivals)
            samples.append(LoadSample(peer, number, tokens, answer["wall_s"], tuple(latencies)))
    return samples


def diverge(runners: Mapping[str, Runner], text_ids: Sequence[int], say: Say) -> dict[str, float]:
    """Mean KL from the FP32 peer, of the peers that show their logits; empty without that one."""
    if TRUTH not in runners:
        return {}
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        truth = Path(folder, f"{TRUTH}.npy")
        for peer in sorted(runners, key=lambda name: name != TRUTH):
            file = Path(folder, f"{peer}.npy")
            request = {"op": "score", "token_ids": list(text_ids), "file": str(file)}
            try:
                if not runners[peer].request(request, RUN_TIMEOUT_S)["exposed"]:
                    continue
                found[peer] = _mean_kl(truth, file)
            except PeerError as error:
                say(f"{peer} shows no logits: {error}")
                continue
            say(f"{peer}: mean KL {found[peer]:.4f} nats")
            if peer != TRUTH:
                file.unlink()
    return found


def _mean_kl(truth: Path, other: Path) -> float:
    """In headrace's environment, which has numpy and the meter."""
    code = (
        "import sys, numpy as np; from headrace.runtime.fidelity import FidelityMeter; "
        "m = FidelityMeter(); m.add(*map(np.load, sys.argv[1:])); print(m.result().mean_kl_nats)"
    )
    python = environments.python_of(PEERS[REFERENCE].environment)
    done = subprocess.run([python, "-c", code, truth, other], capture_output=True, text=True)
    if done.returncode:
        raise PeerError((done.stderr.strip().splitlines() or ["no output"])[-1])
    return float(done.stdout)


def measure_starts(
    peers: Sequence[Peer],
    settings: Settings,
    text_ids: Sequence[int],
    threads: int,
    machine: Machine,
    failures: dict[str, str],
    say: Say,
) -> list[StartSample]:
    """A fresh process each time; what fails here is noted, too."""
    prompts = windows(text_ids, settings.prompt_tokens)
    plan = Plan((_START_SEQUENCES,), settings.prompt_tokens, settings.new_tokens, 1)
    samples = []
    for number in range(1, settings.repeats + 1):
        for peer in peers:
            if peer.name in failures:
                continue
            say(f"start of {peer.name}, round {number}")
            batch = [next(prompts) for _ in range(_START_SEQUENCES)]
            client: Client | None = None
            try:
                model = model_of(peer, machine, say)
                began = time.perf_counter()
                client, _ = start(peer, model, plan, threads, machine, say)
                first_token_s = time.perf_counter() - began
                request = {"op": "run", "prompts": batch, "new_tokens": settings.new_tokens}
                peak = client.request(request, RUN_TIMEOUT_S)["peak_bytes"]
                samples.append(StartSample(peer.name, number, first_token_s, peak))
            except PeerError as error:
                failures[peer.name] = f"at the start: {error}"
            finally:
                if client is not None:
                    client.close()
    return samples


def read_text_ids() -> list[int]:
    """The text of all prompts, as tokens of the checkpoint."""
    return [int(token) for token in json.loads(PROMPT_IDS.read_text("utf-8"))]
