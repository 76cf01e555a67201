"""The peers: what each is, what its environment holds, which worker speaks for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

REFERENCE = "headrace"
REFERENCE_DRAFTS = "headrace_drafts"
TRUTH = "transformers_fp32"  # whose tokens and logits the others are compared with


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
    """A row of the table.

    Attributes:
        options: go to the worker as they are.
        form: of the checkpoint that it reads: "gguf", "package", or one of `peers.convert`.
        drafts: guesses tokens ahead, so it is compared with those that do.
    """

    name: str
    title: str
    environment: Environment
    module: str
    options: Mapping[str, str] = field(default_factory=dict)
    form: str = "gguf"
    drafts: bool = False


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

_GENAI_WHEELS = (
    "onnxruntime-genai==0.18.0",
    "onnxruntime==1.32.0",
    "numpy==2.4.6",
    "flatbuffers==25.12.19",
    "packaging==26.4",
    "protobuf==7.36.2",
)
_CTRANSLATE2_WHEELS = ("ctranslate2==4.8.5", "numpy==2.4.6", "pyyaml==6.0.4")
_GENAI = Environment("ort_genai", wheels=_GENAI_WHEELS)
_CTRANSLATE2 = Environment("ctranslate2", wheels=_CTRANSLATE2_WHEELS)
# For transformers, and for the converters of others. The index has to have torch's build for CPUs:
# the one for CUDA does not load without libraries that are not listed here.
TORCH = Environment(
    "torch",
    wheels=tuple(
        dict.fromkeys(
            (
                "torch==2.13.0",
                "transformers==5.24.0",
                "accelerate==1.16.0",
                "gguf==0.19.0",
                "onnx==1.23.2",
                "onnx-ir==1.1.0",
                "ml-dtypes==0.6.0",
                "safetensors==0.8.0",
                "tokenizers==0.23.3",
                "huggingface-hub==2.4.0",
                "hf-xet==1.8.0",
                "httpcore2==2.16.2",
                "httpx2==2.16.2",
                "truststore==0.10.5",
                "anyio==4.16.0",
                "certifi==2026.10.19.post1",
                "charset-normalizer==3.5.3",
                "click==8.5.1",
                "filelock==4.3.1",
                "fsspec==2026.9.0",
                "h11==0.16.0",
                "idna==3.20",
                "jinja2==3.1.6",
                "markupsafe==3.0.4",
                "mpmath==1.3.0",
                "networkx==3.6.1",
                "psutil==7.2.2",
                "pydantic==2.14.4",
                "pydantic-core==2.50.5",
                "annotated-types==0.8.0",
                "annotated-doc==0.0.7",
                "typing-inspection==0.4.5",
                "typing-extensions==4.16.0",
                "regex==2026.11.19",
                "requests==2.34.2",
                "urllib3==2.8.0",
                "rich==15.0.0",
                "markdown-it-py==4.3.0",
                "mdurl==0.1.2",
                "pygments==2.21.0",
                "shellingham==1.5.4",
                "sympy==1.14.0",
                "setuptools==84.0.0",
                "tqdm==4.70.1",
                "typer==0.29.2",
                *_GENAI_WHEELS,
                *_CTRANSLATE2_WHEELS,
            )
        )
    ),
)
_SERIAL, _BATCHED = {"mode": "serial"}, {"mode": "batched"}

_ALL = (
    Peer(REFERENCE, "headrace", _HEADRACE, "peers.peer_headrace", form="package"),
    Peer("llama_cpp", "llama.cpp, sequences batched", _LLAMA_CPP, "peers.peer_llama_cpp", _BATCHED),
    Peer(
        "llama_cpp_serial",
        "llama.cpp, `Llama` object, one by one",
        _LLAMA_CPP,
        "peers.peer_llama_cpp",
        _SERIAL,
    ),
    Peer("openvino", "OpenVINO GenAI, continuous batching", _OPENVINO, "peers.peer_openvino"),
    *(
        Peer(
            f"ort_genai_{precision}",
            f"onnxruntime-genai, {precision}",
            _GENAI,
            "peers.peer_ort_genai",
            {"precision": precision},
            form=f"genai_{precision}",
        )
        for precision in ("int8", "int4")
    ),
    Peer(
        "ctranslate2",
        "CTranslate2, int8",
        _CTRANSLATE2,
        "peers.peer_ctranslate2",
        form="ctranslate2",
    ),
    *(
        Peer(
            f"transformers_{short}",
            f"transformers, {dtype}",
            TORCH,
            "peers.peer_transformers",
            {"dtype": dtype},
            form="hugging_face",
        )
        for short, dtype in (("bf16", "bfloat16"), ("fp32", "float32"))
    ),
    Peer(
        REFERENCE_DRAFTS,
        "headrace, drafts",
        _HEADRACE,
        "peers.peer_headrace",
        {"drafts": "on"},
        form="package",
        drafts=True,
    ),
    Peer(
        "openvino_lookup",
        "OpenVINO GenAI, prompt lookup",
        _OPENVINO,
        "peers.peer_openvino",
        {"lookup_tokens": "5"},
        drafts=True,
    ),
    Peer(
        "llama_cpp_lookup",
        "llama.cpp, `Llama` object, prompt lookup",
        _LLAMA_CPP,
        "peers.peer_llama_cpp",
        {**_SERIAL, "lookup_tokens": "10"},
        drafts=True,
    ),
)
PEERS = {peer.name: peer for peer in _ALL}
