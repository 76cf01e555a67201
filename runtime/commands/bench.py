"""What this machine does with a package: `headrace bench`.

Decoding is measured as a user has it, through `Runtime`: all sequences are started, and the clock
runs from the last one's first token for a set number of steps. T(n), the cost of a step with n
rows, is measured on the backend alone.
"""

from __future__ import annotations

import dataclasses
import platform
import random
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from headrace.backends.base import Backend, Capabilities
from headrace.backends.registry import choose_device, create_backend
from headrace.runtime.api import Runtime
from headrace.runtime.config import EngineConfig
from headrace.runtime.core import KvCopy, KvOp, Row, StepPlan
from headrace.runtime.errors import RequestError
from headrace.runtime.machine.hardware import probe_hardware
from headrace.runtime.machine.memory import peak_rss_bytes
from headrace.runtime.manifest import read_manifest

MAX_STEP_ROWS = 32
STEP_REPEATS = 7
_PACKAGES = ("headrace", "onnxruntime", "numpy", "tokenizers")


def measure(
    folder: Path,
    *,
    batches: Sequence[int],
    prompt_tokens: int,
    new_tokens: int,
    repeats: int,
    device: str = "auto",
    engine_options: dict[str, Any] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure prefill, decoding at each batch size, and T(n); every figure is a median.

    Args:
        batches: numbers of sequences that decode together.
        prompt_tokens: length of every prompt, random tokens.
        new_tokens: steps that are timed, at least 2.
        repeats: of each measurement.
        engine_options: fields of `EngineConfig`; `max_sequences` is set here.
        progress: called with what is being measured, and with "" at the end.

    Raises:
        RequestError: fewer sequences fit than asked for, or they are too long.
        HeadraceError: the package or the device cannot be used.
    """
    options = dict(engine_options or {})
    progress(f"measuring steps of 1 to {MAX_STEP_ROWS} rows")
    config = EngineConfig.from_dict({**options, "max_sequences": MAX_STEP_ROWS})
    step_ms = step_ms_by_rows(folder, device, config, prompt_tokens)
    rng = random.Random(0)
    # What drafts are worth depends on the text; a step is to be one token of each.
    options |= {"max_sequences": max(batches), "max_draft_tokens": 0}
    with Runtime.load(folder, device, **options) as runtime:
        _require_room(runtime.capabilities, prompt_tokens, new_tokens)
        runtime.generate(_prompt(rng, runtime, prompt_tokens), max_new_tokens=2, ignore_eos=True)
        progress("measuring prompts")
        prefill = median(_prefill_tok_s(runtime, rng, prompt_tokens) for _ in range(repeats))
        decoded = []
        for batch in batches:
            progress(f"measuring {batch} sequences")
            runs = [decode(runtime, rng, batch, prompt_tokens, new_tokens) for _ in range(repeats)]
            decoded.append({"batch": batch, **{k: median(r[k] for r in runs) for k in runs[0]}})
        name = runtime.capabilities.name
    progress("")
    return {
        "package": folder.name,
        "backend": name,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "repeats": repeats,
        "prefill_tok_s": prefill,
        "batches": [{k: b[k] for k in ("batch", "decode_tok_s", "busy_share")} for b in decoded],
        "step_ms_by_rows": step_ms,
        "model_busy_share": sum(b["model_s"] for b in decoded) / sum(b["wall_s"] for b in decoded),
        "peak_rss_bytes": peak_rss_bytes(),
        "versions": versions(),
        "hardware": hardware(),
    }


def step_ms_by_rows(
    folder: Path, device: str, config: EngineConfig, context_tokens: int
) -> dict[str, float]:
    """T(n) in ms: a step of n slots with one new token each, after `context_tokens` tokens.

    n goes from 1 to `config.max_sequences`, or as far as the KV budget reaches.
    """
    manifest = read_manifest(folder)
    chosen = choose_device(device, manifest)
    backend = create_backend(chosen, folder, manifest, config, probe_hardware())
    try:
        caps = backend.load()
        _require_room(caps, context_tokens, 2)
        rows = min(config.max_sequences, caps.kv_budget_tokens // (context_tokens + 1))
        for plan in fill_plans(caps, rows, context_tokens):
            backend.collect(backend.submit(plan))
        return {
            str(n): _step_ms(backend, decode_plan(n, context_tokens)) for n in range(1, rows + 1)
        }
    finally:
        backend.close()


def fill_plans(caps: Capabilities, slots: int, context_tokens: int) -> Iterator[StepPlan]:
    """Steps after which the first `slots` slots hold `context_tokens` random tokens each."""
    rng = random.Random(1)
    tokens = tuple(rng.randrange(caps.vocab_size) for _ in range(context_tokens))
    for start in range(0, context_tokens, caps.max_row_tokens):
        chunk = tokens[start : start + caps.max_row_tokens]
        yield StepPlan(0, (Row(0, 0, start, chunk, 0),))
    copies: tuple[KvOp, ...] = tuple(KvCopy(0, slot, context_tokens) for slot in range(1, slots))
    yield StepPlan(0, (), copies)


def decode_plan(rows: int, past_len: int) -> StepPlan:
    """A step of one token in each of the first `rows` slots; repeating it overwrites the token."""
    return StepPlan(0, tuple(Row(slot, slot, past_len, (slot + 1,), 1) for slot in range(rows)))


def _step_ms(backend: Backend, plan: StepPlan) -> float:
    times = []
    for _ in range(STEP_REPEATS + 1):
        start = time.perf_counter()
        backend.collect(backend.submit(plan))
        times.append((time.perf_counter() - start) * 1e3)
    return median(times[1:])  # the first one sets the shape up


def _prefill_tok_s(runtime: Runtime, rng: random.Random, prompt_tokens: int) -> float:
    prompt = _prompt(rng, runtime, prompt_tokens)
    start = time.perf_counter()
    runtime.generate(prompt, max_new_tokens=1, ignore_eos=True)
    return prompt_tokens / (time.perf_counter() - start)


def decode(
    runtime: Runtime, rng: random.Random, batch: int, prompt_tokens: int, new_tokens: int
) -> dict[str, float]:
    """Decode `batch` sequences together and time at least `new_tokens` - 1 steps of all of them.

    The sequences could go on to the end of the context; they are cancelled when enough was seen.
    Steps are counted by the engine's log: a reader may lag behind an engine that is fast.
    """
    caps = runtime.capabilities
    room = min(caps.context_tokens, caps.kv_budget_tokens // batch) - prompt_tokens
    requests = [
        runtime.submit(
            _prompt(rng, runtime, prompt_tokens), max_new_tokens=max(room, 1), ignore_eos=True
        )
        for _ in range(batch)
    ]
    try:
        deltas = iter(requests[-1])  # started last, so from its first token on all are running
        next(deltas)
        start, first = time.perf_counter(), runtime.steps[-1].step_id
        last = first
        while last - first < new_tokens - 1:
            if next(deltas, None) is None:
                raise RequestError(f"{batch} sequences leave no room for {new_tokens} tokens each")
            last = runtime.steps[-1].step_id
        wall_s = time.perf_counter() - start
        steps = [step for step in runtime.steps if first < step.step_id <= last]
    finally:
        for request in requests:
            request.cancel()
        for request in requests:
            request.result()
    if min(step.num_rows for step in steps) < batch:
        raise RequestError(f"{batch} sequences of this length do not fit at once")
    model_s = sum(step.model_ms for step in steps) / 1e3
    return {
        "decode_tok_s": batch * len(steps) / wall_s,
        "busy_share": model_s / wall_s,
        "model_s": model_s,
        "wall_s": wall_s,
    }


def _prompt(rng: random.Random, runtime: Runtime, num_tokens: int) -> list[int]:
    return [rng.randrange(runtime.capabilities.vocab_size) for _ in range(num_tokens)]


def _require_room(caps: Capabilities, prompt_tokens: int, new_tokens: int) -> None:
    if new_tokens < 2:
        raise RequestError("decoding is timed between tokens: measure at least 2 new tokens")
    if prompt_tokens + new_tokens > caps.context_tokens:
        raise RequestError(
            f"{prompt_tokens} + {new_tokens} tokens exceed the context of {caps.context_tokens}"
        )


def versions() -> dict[str, str]:
    """Of Python and of what decides how fast this is."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """The machine as this process sees it, as plain data."""
    found = probe_hardware()
    fields = dataclasses.asdict(found)
    plain = {k: sorted(v) if isinstance(v, frozenset) else v for k, v in fields.items()}
    return {**plain, "usable_cores": found.usable_cores}


def render(report: dict[str, Any]) -> str:
    """`measure`'s report for people."""
    steps = {int(n): ms for n, ms in report["step_ms_by_rows"].items()}
    shown = [n for n in (1, 2, 4, 8, 16, 32) if n in steps]
    machine = report["hardware"]
    lines = [
        f"{report['package']} on {report['backend']}, {machine['cpu_name']}, "
        f"onnxruntime {report['versions'].get('onnxruntime', 'not installed')}",
        f"prompts of {report['prompt_tokens']} tokens, {report['new_tokens']} new ones, "
        f"median of {report['repeats']}",
        "",
        f"prefill  {report['prefill_tok_s']:10.1f} tok/s",
        *(
            f"decode   {b['decode_tok_s']:10.1f} tok/s with {b['batch']:3} sequences, "
            f"{b['busy_share']:.1%} of the time inside the model"
            for b in report["batches"]
        ),
        "",
        "rows in a step " + "".join(f"{n:9}" for n in shown),
        "T(n) in ms     " + "".join(f"{steps[n]:9.2f}" for n in shown),
        "T(n) / T(1)    " + "".join(f"{steps[n] / steps[1]:9.2f}" for n in shown),
        "",
        f"peak memory {report['peak_rss_bytes'] / 1e6:.0f} MB",
    ]
    return "\n".join(lines)
