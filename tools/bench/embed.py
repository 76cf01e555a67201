"""Encoder packages against sentence-transformers and optimum's ONNX Runtime, taking turns.

    python tools/bench/embed.py CHECKPOINT fp32=DIR int8=DIR [--optimum DIR] [--texts 100]
                                [--longest 160] [--rounds 5] [--batch 32] [--json]

CHECKPOINT is the folder that the packages were made from; --optimum an export of it
(`optimum-cli export onnx --library transformers --task feature-extraction`). Texts are prose in
pieces from 4 words to `--longest`, lengths spread evenly over a logarithmic scale, as many as
`--texts`.

Peers, all float32 and with as many threads:
    sentence-transformers   encode(), which sorts by length and pads each batch
    sentence-transformers-ort   the same on optimum's export
    optimum   pipeline("feature-extraction"), which pads each batch of texts as they come

Ratios are of wall time and of processor time, above 1 where the package needs less: the median over
the rounds of what was measured next to each other. Cosines are to sentence-transformers.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import common
import numpy as np
from numpy.typing import NDArray

from headrace.runtime import Embedder
from headrace.runtime.commands.bench import hardware

Vectors = NDArray[np.float32]
Encode = Callable[[list[str]], Any]
PEERS = ("sentence-transformers", "optimum-onnx", "optimum", "transformers", "torch")


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("packages", nargs="+", type=common.named_package, metavar="NAME=DIR")
    parser.add_argument("--optimum", type=Path, metavar="DIR", help="ONNX export of the checkpoint")
    parser.add_argument("--texts", type=int, default=100)
    parser.add_argument("--longest", type=int, default=160, help="words of the longest text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32, help="texts in a batch of the peers")
    args = parser.parse_args()
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    threads = args.threads or hardware()["usable_cores"]
    embedders = {n: Embedder.load(d, num_threads=threads) for n, d in dict(args.packages).items()}
    ours: dict[str, Encode] = {
        name: lambda texts, e=embedder: e.embed(texts, truncate=True)  # type: ignore[misc]
        for name, embedder in embedders.items()
    }
    limit = next(iter(embedders.values())).max_tokens
    theirs = peers(args.checkpoint, args.optimum, threads, args.batch, limit)
    texts = mixed_texts(args.texts, args.longest)
    processor: dict[str, list[float]] = {name: [] for name in (*ours, *theirs)}

    def measure(name: str, encode: Encode) -> float:
        start, cpu = time.perf_counter(), time.process_time()
        encode(texts)
        processor[name].append(time.process_time() - cpu)
        return time.perf_counter() - start

    turns = {n: lambda n=n, f=f: measure(n, f) for n, f in (ours | theirs).items()}
    wall = common.take_turns(turns, args.rounds)
    processor = {name: values[1:] for name, values in processor.items()}  # the first is to warm up
    reference = theirs["sentence-transformers"](texts)
    figures: dict[str, Any] = {
        "texts": len(texts),
        "tokens": sum(embedders[next(iter(ours))].embed_all(texts, truncate=True).num_tokens),
        "rounds": args.rounds,
        "threads": threads,
        "peers": peer_versions(),
        "texts_per_s": {name: len(texts) / median(values) for name, values in wall.items()},
        "processor_s": {name: median(values) for name, values in processor.items()},
        "cosine": {name: cosines(encode(texts), reference) for name, encode in ours.items()},
        "wall_ratio": ratios(wall, ours, theirs),
        "processor_ratio": ratios(processor, ours, theirs),
    }
    common.show(common.report(figures), table(figures), as_json=args.json)


def mixed_texts(count: int, longest_words: int) -> list[str]:
    """Pieces of prose; the same for the same arguments."""
    prose = resources.files("headrace.exporters") / "data" / "calibration_wikitext.txt"
    words = prose.read_text(encoding="utf-8").split()
    rng = random.Random(0)
    texts = []
    for _ in range(count):
        size = round(4 * (longest_words / 4) ** rng.random())
        start = rng.randrange(len(words) - size)
        texts.append(" ".join(words[start : start + size]))
    return texts


def peers(
    checkpoint: Path, export: Path | None, threads: int, batch: int, limit: int
) -> dict[str, Encode]:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    plain = SentenceTransformer(str(checkpoint), device="cpu")
    found: dict[str, Encode] = {
        "sentence-transformers": lambda texts: plain.encode(texts, batch_size=batch)
    }
    if export is None:
        return found
    import onnxruntime as ort
    from optimum.onnxruntime import ORTModelForFeatureExtraction, pipeline
    from transformers import AutoTokenizer

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    model = ORTModelForFeatureExtraction.from_pretrained(export, session_options=options)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    extract = pipeline("feature-extraction", model=model, tokenizer=tokenizer)
    with_ort = SentenceTransformer(
        str(export), device="cpu", backend="onnx", model_kwargs={"session_options": options}
    )
    with_ort.max_seq_length = limit
    keep = {"padding": True, "truncation": True, "max_length": limit}
    found["sentence-transformers-ort"] = lambda texts: with_ort.encode(texts, batch_size=batch)
    found["optimum"] = lambda texts: extract(
        texts, batch_size=batch, tokenize_kwargs=keep, return_tensors=True
    )
    return found


def cosines(vectors: Vectors, reference: Vectors) -> dict[str, float]:
    products = (vectors * reference).sum(axis=1)
    values = products / np.linalg.norm(vectors, axis=1) / np.linalg.norm(reference, axis=1)
    return {"mean": float(values.mean()), "least": float(values.min())}


def ratios(
    values: dict[str, list[float]], ours: dict[str, Encode], theirs: dict[str, Encode]
) -> dict[str, dict[str, float]]:
    return {name: {peer: common.pair_ratio(values, peer, name) for peer in theirs} for name in ours}


def peer_versions() -> dict[str, str]:
    found = {}
    for name in PEERS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def table(figures: dict[str, Any]) -> list[str]:
    lines = [
        f"{figures['texts']} texts, {figures['tokens']} tokens, {figures['threads']} threads, "
        + ", ".join(f"{name} {found}" for name, found in figures["peers"].items()),
        f"{'':26} {'texts/s':>9} {'processor s':>12}",
    ]
    lines += [
        f"{name:26} {speed:9.1f} {figures['processor_s'][name]:12.2f}"
        for name, speed in figures["texts_per_s"].items()
    ]
    for name, cosine in figures["cosine"].items():
        lines.append(f"{name}: cosine mean {cosine['mean']:.5f}, least {cosine['least']:.5f}")
        for peer, ratio in figures["wall_ratio"][name].items():
            cpu = figures["processor_ratio"][name][peer]
            lines.append(f"  {ratio:5.2f}x {peer} ({cpu:.2f}x in processor time)")
    return lines


if __name__ == "__main__":
    main()
