"""The checkpoint in the form that a peer reads, made once below `.cache`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from peers import environments
from peers.environments import ROOT
from peers.machine import Machine
from peers.specs import PEERS, REFERENCE, TORCH

PACKAGE = ROOT / ".cache" / "packages" / "smollm2"
FOLDER = environments.FOLDER / "models"

Say = Callable[[str], None]


def ensure(form: str, gguf: Path, machine: Machine, say: Say) -> Path:
    """Path of the checkpoint as `Peer.form` names it; a folder appears when it is complete.

    Raises:
        PeerError: the conversion failed.
    """
    if form == "gguf":
        return gguf
    if form == "package":
        return _package(gguf, say)
    made = FOLDER / form
    if made.exists():
        return made
    source = gguf if form == "hugging_face" else ensure("hugging_face", gguf, machine, say)
    environments.ensure(TORCH, machine, say)
    unfinished = FOLDER / f"{form}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    environments.run_logged(
        [environments.python_of(TORCH), "-m", "peers.convert", form, source, unfinished],
        environments.log_of(TORCH),
        f"converting the checkpoint to {form}",
        say,
        {"PYTHONPATH": str(ROOT / "tools")},
    )
    return unfinished.rename(made)


def _package(gguf: Path, say: Say) -> Path:
    if not (PACKAGE / "manifest.json").exists():
        environment = PEERS[REFERENCE].environment
        PACKAGE.parent.mkdir(parents=True, exist_ok=True)
        environments.run_logged(
            [
                *(environments.python_of(environment), "-m", "headrace.exporters.cli"),
                *(gguf, "-o", PACKAGE, "-q"),
            ],
            environments.log_of(environment),
            "headrace: exporting the checkpoint",
            say,
        )
    return PACKAGE
