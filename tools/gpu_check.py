"""Whether headrace's CUDA targets are right and how fast they are, on a machine with one card.

    pip install "headrace[cuda]" onnx onnx-ir gguf safetensors ml-dtypes rich
    python tools/gpu_check.py [SOURCE] [--minutes 8] [--rows 1,8,32,128] [--context 256]

SOURCE is a checkpoint as for runtime-export; without it two models with random weights are made, a
small one to compare and one of 0.6 billion weights to time. Each target is compared with the same
rounded weights in float32 on the CPU: the same texts, in chunks, one by one and in ragged batches
with returns, and 32 greedy tokens. Then decoding is timed at each number of rows, every row with a
context of its own, and what has to be read a step is set against what the card copies in that time.

The last line says whether it passed. It has never run with a card.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Backend, Capabilities
from headrace.backends.cuda import provider
from headrace.backends.cuda.device import CudaDevice, Device
from headrace.backends.registry import create_backend
from headrace.exporters.cuda_target import CUDA_TARGETS
from headrace.exporters.package import export_package
from headrace.runtime.config import EngineConfig
from headrace.runtime.core import Row, StepPlan
from headrace.runtime.errors import HeadraceError
from headrace.runtime.fidelity import first_difference, log_softmax, mean_kl_nats
from headrace.runtime.machine.hardware import probe_hardware
from headrace.runtime.manifest import Manifest, TargetInfo, read_manifest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import tiny
from backend_driver import Schedule, drive, ragged_schedule
from cuda_reference import Reference

Float = NDArray[np.float32]
OpenBackend = Callable[[Path, EngineConfig], Backend]

# Mean KL in nats that FP16 may cost; 0.0005 was found with the reference evaluator in place of a
# card, for each target.
LIMIT_NATS = 3e-3
LENGTHS = (1, 40, 300, 130)  # across blocks of 256, 128 and 64 tokens
GREEDY_TOKENS = 32
REPEATS = 20
COPY_BYTES = 1 << 29
SMALL: dict[str, Any] = {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "vocab": 1024}
LARGE: dict[str, Any] = {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "vocab": 32000}


@dataclass(frozen=True, slots=True)
class Parity:
    """Of a target with the CPU. `greedy` counts equal tokens before the first that differs."""

    target: str
    mean_kl_nats: float
    rms_share: float
    top1: float
    greedy: tuple[int, ...]

    @property
    def passed(self) -> bool:
        return self.mean_kl_nats < LIMIT_NATS

    def __str__(self) -> str:
        return (
            f"{self.target:10} {self.mean_kl_nats:10.6f} {self.rms_share:8.4f} {self.top1:7.1%}  "
            f"{'/'.join(map(str, self.greedy)):>14}  {'ok' if self.passed else 'FAILED'}"
        )


@dataclass(frozen=True, slots=True)
class Speed:
    """Decoding with `rows` rows: the median step, of which `model_ms` within the session."""

    target: str
    rows: int
    step_ms: float
    model_ms: float
    read_bytes: int

    def line(self, copied_bytes_s: float) -> str:
        read_bytes_s, tokens_s = (n / self.step_ms * 1e3 for n in (self.read_bytes, self.rows))
        return (
            f"{self.target:10} {self.rows:5} {self.step_ms:9.3f} "
            f"{self.model_ms / self.step_ms:7.1%} {tokens_s:10.0f} {read_bytes_s / 1e9:9.1f} "
            f"{read_bytes_s / copied_bytes_s:10.1%}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every target passed, 1 if not or if there is no card."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, nargs="?", metavar="SOURCE")
    parser.add_argument("--minutes", type=float, default=8.0, help="what is left then is left out")
    parser.add_argument("--rows", default="1,8,32,128", metavar="LIST")
    parser.add_argument("--context", type=int, default=256, metavar="TOKENS")
    args = parser.parse_args(argv)
    end = time.monotonic() + args.minutes * 60
    if (reason := provider.obstacle()) is not None:
        print(f"gpu_check: nothing was checked: {reason}")
        return 1
    rows = [int(part) for part in args.rows.split(",")]
    try:
        return check(args.source, rows, args.context, end, open_backend, CudaDevice())
    except HeadraceError as error:
        print(f"gpu_check: FAILED: {error}")
        return 1


def check(
    source: Path | None,
    rows: Sequence[int],
    context: int,
    end: float,
    opened: OpenBackend,
    device: Device,
    large: dict[str, Any] = LARGE,
) -> int:
    """Everything, as long as `time.monotonic()` is below `end`."""
    print(f"copies on the device: {(copied := copied_bytes_s(device)) / 1e9:.0f} GB/s", flush=True)
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as scratch:
        folder = Path(scratch)
        chosen = source or tiny.write_tiny_llama(folder / "small", **SMALL)
        package = export(chosen, folder / "p")
        print(f"\n{'target':10} {'KL, nats':>10} {'RMS':>8} {'top-1':>7}  {'equal greedy':>14}")
        parities = []
        for parity in compare(chosen, package, folder, opened):
            print(parity, flush=True)
            parities.append(parity)
        failed = [parity.target for parity in parities if not parity.passed]
        if source is None and time.monotonic() < end:
            made = tiny.write_tiny_llama(folder / "large", dtype="float16", context=1024, **large)
            package = export(made, folder / "q")
        left_out = timed(package, rows, context, end, opened, copied)
    if left_out:
        print(f"no time was left for {', '.join(left_out)}")
    names = ", ".join(failed)
    print(f"gpu_check: {'FAILED: ' + names if failed else 'passed: every target agrees'}")
    return 1 if failed else 0


def open_backend(package: Path, config: EngineConfig) -> Backend:
    return create_backend("cuda", package, read_manifest(package), config, probe_hardware())


def export(source: Path, package: Path) -> Path:
    export_package(source, package, targets=tuple(CUDA_TARGETS))
    return package


def compare(source: Path, package: Path, folder: Path, opened: OpenBackend) -> Iterator[Parity]:
    manifest = read_manifest(package)
    rng = np.random.default_rng(1)
    most = manifest.model.context_tokens - GREEDY_TOKENS
    lengths = [min(length, most) for length in LENGTHS]
    texts = [rng.integers(3, manifest.model.vocab_size, n).tolist() for n in lengths]
    prompts = [text[:40] for text in texts]
    schedules = [chunked(lengths), ragged_schedule(lengths, rng)]
    for target in cuda_targets(manifest):
        reference = Reference(
            source, target.name, folder / f"reference-{target.name}", max(lengths) + GREEDY_TOKENS
        )
        expected = np.concatenate([reference.logits(text) for text in texts])
        config = EngineConfig(max_sequences=len(texts), target=target.name, max_chunk_tokens=512)
        found = [
            np.concatenate(drive(opened(package, config), texts, steps)[0]) for steps in schedules
        ]
        answers = greedy(opened(package, config), prompts)
        wanted = [reference.greedy(prompt, GREEDY_TOKENS) for prompt in prompts]
        log_p = log_softmax(expected)
        yield Parity(
            target.name,
            max(mean_kl_nats(log_p, log_softmax(logits)) for logits in found),
            max(rms_share(logits, expected) for logits in found),
            min(top1_share(logits, expected) for logits in found),
            tuple(first_difference(a, b) for a, b in zip(wanted, answers, strict=True)),
        )


def chunked(lengths: Sequence[int]) -> Schedule:
    """Prompts in up to two chunks, then the last eight tokens one by one."""
    steps: list[list[tuple[int, int, int]]] = [[], []]
    for i, length in enumerate(lengths):
        prompt = max(1, length - 8)
        half = -(-prompt // 2)
        steps[0].append((i, 0, half))
        if half < prompt:
            steps[1].append((i, half, prompt))
    for past in range(max(lengths)):
        decode = [
            (i, past + start, past + start + 1)
            for i, length in enumerate(lengths)
            if (start := max(1, length - 8)) + past < length
        ]
        if decode:
            steps.append(decode)
    return [step for step in steps if step]


def greedy(backend: Backend, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The likeliest continuation of each prompt, decoded together."""
    backend.load()
    texts = [list(prompt) for prompt in prompts]
    past = [0] * len(texts)
    try:
        for _ in range(GREEDY_TOKENS):
            rows = [Row(i, i, past[i], tuple(text[past[i] :]), 1) for i, text in enumerate(texts)]
            output = backend.collect(backend.submit(StepPlan(0, tuple(rows))))
            for i, token in enumerate(output.logits.argmax(axis=1).tolist()):
                past[i] = len(texts[i])
                texts[i].append(token)
    finally:
        backend.close()
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def top1_share(actual: Float, expected: Float) -> float:
    """Of rows with the same likeliest token."""
    return float((actual.argmax(axis=1) == expected.argmax(axis=1)).mean())


def rms_share(actual: Float, expected: Float) -> float:
    """Root mean square of the difference, in units of that of the expected values."""
    return float(np.sqrt(np.square(actual - expected).mean() / np.square(expected).mean()))


def timed(
    package: Path,
    rows: Sequence[int],
    context: int,
    end: float,
    opened: OpenBackend,
    copied: float,
) -> list[str]:
    """Print how fast each target decodes; returns what there was no time for."""
    manifest = read_manifest(package)
    print(
        f"\n{'target':10} {'rows':>5} {'step, ms':>9} {'session':>7} {'tokens/s':>10} {'GB/s':>9} "
        f"{'of copies':>10}"
    )
    left_out = []
    for target in cuda_targets(manifest):
        if time.monotonic() > end:
            left_out.append(target.name)
            continue
        config = EngineConfig(
            max_sequences=max(rows),
            target=target.name,
            context_tokens=min(context + 64, manifest.model.context_tokens),
        )
        backend = opened(package, config)
        try:
            caps = backend.load()
            fit = min(max(rows), caps.kv_budget_tokens // (context + 1))
            fill(backend, caps, fit, context)
            for count in rows:
                if time.monotonic() > end or count > fit:
                    left_out.append(f"{target.name} with {count} rows")
                    continue
                speed = decode_speed(backend, target, manifest, count, context)
                print(speed.line(copied), flush=True)
        finally:
            backend.close()
    return left_out


def fill(backend: Backend, caps: Capabilities, slots: int, context: int) -> None:
    """Give every slot a text of its own: shared blocks would be read from the cache of the card."""
    rng = np.random.default_rng(2)
    together = max(1, 2048 // context)
    for first in range(0, slots, together):
        group = range(first, min(first + together, slots))
        for start in range(0, context, caps.max_row_tokens):
            size = min(caps.max_row_tokens, context - start)
            rows = [
                Row(slot, slot, start, tuple(rng.integers(0, caps.vocab_size, size).tolist()), 0)
                for slot in group
            ]
            backend.collect(backend.submit(StepPlan(0, tuple(rows))))


def decode_speed(
    backend: Backend, target: TargetInfo, manifest: Manifest, rows: int, context: int
) -> Speed:
    plan = StepPlan(0, tuple(Row(slot, slot, context, (slot,), 1) for slot in range(rows)))
    steps, within = [], []
    for _ in range(REPEATS + 2):
        start = time.perf_counter()
        output = backend.collect(backend.submit(plan))
        steps.append((time.perf_counter() - start) * 1e3)
        within.append(output.model_ms)
    cached = rows * context * target.kv_cache.bytes_per_token
    return Speed(
        target.name,
        rows,
        median(steps[2:]),  # kernels are chosen and memory is found in the first steps
        median(within[2:]),
        target.weight_bytes - looked_up_bytes(target, manifest) + cached,
    )


def looked_up_bytes(target: TargetInfo, manifest: Manifest) -> int:
    """Of an embedding that is not the head, too: a step reads some rows of it."""
    if manifest.model.tied_embeddings:
        return 0
    return next((t.bytes for t in target.tensors if "embed" in t.name), 0)


def copied_bytes_s(device: Device) -> float:
    """Bytes read and written a second by a copy on the device: what memory gives at best."""
    size = min(COPY_BYTES, device.free_bytes() // 4)
    source = device.allocate(size)
    target = device.allocate(size)
    try:
        device.copy(source, target, size)
        start = time.perf_counter()
        for _ in range(REPEATS):
            device.copy(source, target, size)
        return 2 * size * REPEATS / (time.perf_counter() - start)
    finally:
        device.release(target)
        device.release(source)


def cuda_targets(manifest: Manifest) -> list[TargetInfo]:
    return [target for target in manifest.targets if target.device == "cuda"]


if __name__ == "__main__":
    raise SystemExit(main())
