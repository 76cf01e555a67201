"""The process of an isolated backend: it loads a package and runs the steps that it is told to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.backends.base import Backend
from headrace.backends.isolated.values import (
    decode_plan,
    encode_capabilities,
    encode_error,
    encode_output,
)
from headrace.backends.registry import choose_device, create_backend
from headrace.runtime.child.entry import Link
from headrace.runtime.config import EngineConfig
from headrace.runtime.errors import HeadraceError
from headrace.runtime.machine.hardware import probe_hardware
from headrace.runtime.machine.memory import trim_heap
from headrace.runtime.manifest import read_manifest

MAX_BODY_BYTES = 1 << 40  # the parent sends what its own user asked for


def serve(link: Link) -> None:
    """Load what the first message names and run steps until the link ends."""
    serve_backend(link, _backend)


def serve_backend(link: Link, make: Callable[[Mapping[str, Any]], Backend]) -> None:
    """Load the backend that the first message wants and run its steps until the link ends.

    Args:
        make: a backend, not loaded yet, of the message's header.
    """
    wanted = link.receive(MAX_BODY_BYTES).header
    try:
        backend = make(wanted)
        capabilities = backend.load()
    except HeadraceError as error:
        link.send({"error": encode_error(error)})
        return
    trim_heap()
    link.send({"capabilities": encode_capabilities(capabilities)})
    run_steps(link, backend)


def run_steps(link: Link, backend: Backend) -> None:
    """Answer each plan with its output, or with the error that it came to."""
    while True:
        frame = link.receive(MAX_BODY_BYTES)
        try:
            output = backend.collect(backend.submit(decode_plan(frame.header, frame.body)))
        except HeadraceError as error:
            link.send({"error": encode_error(error)})
        else:
            header, body = encode_output(output)
            link.send(header, *body)


def _backend(wanted: Mapping[str, Any]) -> Backend:
    folder, config = Path(wanted["folder"]), EngineConfig.from_dict(wanted["config"])
    manifest = read_manifest(folder)
    device = choose_device(wanted["device"], manifest)
    return create_backend(device, folder, manifest, config, probe_hardware())
