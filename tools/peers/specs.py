"""The peers: what each is, what its environment holds, which worker speaks for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

REFERENCE = "headrace"


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment of pinned packages; all dependencies are listed.

    Attributes:
        wheels: installed as they are.
        source: built on this machine for its CPU, after the wheels.
        without_amx: compiler flags for another build of `source`, where its first one dies of an
            illegal instruction although the CPU lists AMX.
        holds_headrace: this checkout and the pins of `tools/constraints.txt` as well.
    """

    name: str
    wheels: tuple[str, ...] = ()
    source: str | None = None
    without_amx: str = ""
    holds_headrace: bool = False


@dataclass(frozen=True, slots=True)
class Peer:
    """A row of the table. `options` goes to the worker as it is."""

    name: str
    title: str
    environment: Environment
    module: str
    options: Mapping[str, str] = field(default_factory=dict)


_HEADRACE = Environment("headrace", holds_headrace=True)
_LLAMA_CPP = Environment(
    "llama_cpp",
    wheels=(
        "scikit-build-core==1.1.2",
        "cmake==4.4.5",
        "ninja==1.13.2",
        "packaging==26.4",
        "pathspec==1.1.1",
        "typing-extensions==4.16.0",
        "numpy==2.4.6",
        "diskcache==5.6.3",
        "jinja2==3.1.6",
        "markupsafe==3.0.4",
    ),
    source="llama-cpp-python==0.3.36",
    without_amx="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16",
)
# openvino-telemetry is left out: only the conversion tools import it.
_OPENVINO = Environment(
    "openvino",
    wheels=(
        "openvino-genai==2026.4.1.0",
        "openvino-tokenizers==2026.4.1.0",
        "openvino==2026.4.1",
        "numpy==2.4.6",
    ),
)

PEERS = {
    peer.name: peer
    for peer in (
        Peer(REFERENCE, "headrace", _HEADRACE, "peers.peer_headrace"),
        Peer(
            "llama_cpp",
            "llama.cpp, sequences batched",
            _LLAMA_CPP,
            "peers.peer_llama_cpp",
            {"mode": "batched"},
        ),
        Peer(
            "llama_cpp_serial",
            "llama.cpp, `Llama` object, one by one",
            _LLAMA_CPP,
            "peers.peer_llama_cpp",
            {"mode": "serial"},
        ),
        Peer("openvino", "OpenVINO GenAI, continuous batching", _OPENVINO, "peers.peer_openvino"),
    )
}
