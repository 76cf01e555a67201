"""`headrace bench --fidelity`: a package against an FP32 package of the same checkpoint.

Both read the same tokens through their backends, as in production: a text in chunks, and the
answers that the FP32 package itself writes to prompts (the prompts are read, too, but do not
count). The package then answers the prompts as well, and the answers are compared token by token.

The FP32 package answers twice. On answers that it draws at temperature 1, perplexity tells what the
package lost: the mean log ratio of both models is then their KL, but for chance. Greedy answers are
its own maximum: whatever a package does differently raises their perplexity, also where it is no
worse.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.backends.base import Backend, Capabilities
from headrace.backends.registry import choose_device, create_backend
from headrace.runtime.api import Runtime
from headrace.runtime.commands.bench import hardware, versions
from headrace.runtime.config import EngineConfig, GenerationConfig
from headrace.runtime.core import Row, StepPlan
from headrace.runtime.errors import PackageError, RequestError
from headrace.runtime.fidelity import Fidelity, FidelityMeter, first_difference, spread_chunks
from headrace.runtime.machine.hardware import probe_hardware
from headrace.runtime.manifest import Manifest, read_manifest
from headrace.runtime.package_prompts import encode_prompts
from headrace.runtime.text_files import read_text
from headrace.runtime.tokenizer import Tokenizer

CHUNK_TOKENS = 512
_STEP_TOKENS = 128  # two models' logits for these are held at a time
_PARALLEL_ANSWERS = 8


@dataclass(frozen=True, slots=True)
class Answers:
    """Greedy answers of both packages to the same prompts."""

    fp32: tuple[tuple[int, ...], ...]
    package: tuple[tuple[int, ...], ...]

    def agreement(self) -> dict[str, float]:
        """Share of equal answers, and tokens until answers part (all of them where they do not)."""
        pairs = list(zip(self.fp32, self.package, strict=True))
        return {
            "equal_share": sum(a == b for a, b in pairs) / len(pairs),
            "mean_tokens_to_difference": sum(first_difference(a, b) for a, b in pairs) / len(pairs),
            "mean_answer_tokens": sum(len(a) for a, _ in pairs) / len(pairs),
        }


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens to compare on; predictions of the first `given` tokens do not count.

    All prompts share the template's system message, which would be counted once for each.
    """

    token_ids: tuple[int, ...]
    given: int = 0


def measure_fidelity(
    folder: Path,
    reference: Path,
    text: Path,
    *,
    prompts: Path | None = None,
    skip_share: float = 0.0,
    text_tokens: int = 4096,
    new_tokens: int = 128,
    device: str = "auto",
    engine_options: dict[str, Any] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Compare a package with an FP32 package of its checkpoint.

    Args:
        text: read in chunks of 512 tokens that are spread over it.
        prompts: JSON lines, each a string or an object with `prompt` or `turns`; the FP32 package
            answers them greedily ("answers") and at temperature 1 ("sampled"), at most `new_tokens`
            tokens each.
        skip_share: of the text, from its start, that is left out because it was calibrated on.

    Raises:
        PackageError: the packages are not of the same checkpoint, or the reference is not FP32.
        RequestError: a file has no text, or a line of it is no prompt.
    """
    manifests = (read_manifest(reference), read_manifest(folder))
    _require_same_model(*manifests, folder, reference)
    tokenizer = Tokenizer.load(folder, manifests[1].tokenizer)
    whole = read_text(text, "text")
    ids = tokenizer.encode_prompt(whole[int(len(whole) * skip_share) :])
    size = min(CHUNK_TOKENS, manifests[0].model.context_tokens)
    chunks = spread_chunks(ids, max(text_tokens // size, 1), size)
    if sum(map(len, chunks)) < 2:
        raise RequestError(f"{text} has too little text to compare on")
    asked = [] if prompts is None else encode_prompts(folder, manifests[1], _read_prompts(prompts))

    def answers(which: Path, temperature: float) -> tuple[tuple[int, ...], ...]:
        config = GenerationConfig(max_new_tokens=new_tokens, temperature=temperature)
        return _answer(which, asked, config, device, engine_options or {}, progress)

    texts = {"text": [Piece(tuple(chunk)) for chunk in chunks]}
    greedy = None
    if asked:
        greedy = Answers(answers(reference, 0.0), answers(folder, 0.0))
        texts["answers"] = _pieces(asked, greedy.fp32)
        texts["sampled"] = _pieces(asked, answers(reference, 1.0))
    options = {**(engine_options or {}), "max_sequences": 1}
    measured = _compare(folder, reference, texts, device, options, progress)
    progress("")
    return {
        "package": folder.name,
        "reference": reference.name,
        "precision": manifests[1].targets[0].precision,
        "kv_cache": manifests[1].targets[0].kv_cache.dtype,
        **{name: found.to_dict() for name, found in measured.items()},
        "greedy": None if greedy is None else greedy.agreement(),
        "versions": versions(),
        "hardware": hardware(),
    }


def _require_same_model(
    reference: Manifest, package: Manifest, folder: Path, reference_folder: Path
) -> None:
    if reference.targets[0].precision != "fp32":
        raise PackageError(
            f"{reference_folder} is {reference.targets[0].precision}, not fp32; "
            "export the reference with --precision fp32"
        )
    if reference.source.sha256 != package.source.sha256:
        raise PackageError(f"{folder} and {reference_folder} are not of the same checkpoint")


def _read_prompts(path: Path) -> list[str]:
    prompts = []
    for number, line in enumerate(read_text(path, "prompts").splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            raise RequestError(f"{path}, line {number}: not JSON") from None
        if isinstance(value, dict):
            value = value.get("prompt") or next(iter(value.get("turns") or []), None)
        if not isinstance(value, str) or not value:
            raise RequestError(f"{path}, line {number}: no string, `prompt` or `turns`")
        prompts.append(value)
    return prompts


def _answer(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    device: str,
    engine_options: dict[str, Any],
    progress: Callable[[str], None],
) -> tuple[tuple[int, ...], ...]:
    """Token ids of the answers, each drawn with a seed of its own."""
    progress(f"{folder.name} answers {len(prompts)} prompts")
    room = {"max_sequences": _PARALLEL_ANSWERS, "max_waiting": len(prompts)}
    with Runtime.load(folder, device, **{**engine_options, **room}) as runtime:
        handles = [runtime.submit(p, config, seed=i) for i, p in enumerate(prompts)]
        done = [handle.result() for handle in handles]
    return tuple(tuple(completion.token_ids) for completion in done)


def _pieces(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[Piece]:
    pairs = zip(prompts, answers, strict=True)
    return [Piece((*prompt, *answer), len(prompt)) for prompt, answer in pairs]


def _compare(
    folder: Path,
    reference: Path,
    texts: dict[str, list[Piece]],
    device: str,
    options: dict[str, Any],
    progress: Callable[[str], None],
) -> dict[str, Fidelity]:
    longest = max(len(piece.token_ids) for pieces in texts.values() for piece in pieces)
    with ExitStack() as stack:
        loaded = []
        for which in (reference, folder):
            backend, caps = _load(which, device, options)
            stack.callback(backend.close)
            if longest > caps.context_tokens:
                raise RequestError(f"{longest} tokens exceed the context of {caps.context_tokens}")
            loaded.append((backend, min(caps.max_row_tokens, _STEP_TOKENS)))
        results = {}
        for name, pieces in texts.items():
            meter = FidelityMeter()
            for done, piece in enumerate(pieces):
                progress(f"comparing {name}: {done} of {len(pieces)} pieces")
                _compare_piece(meter, piece, loaded)
            if pieces:
                results[name] = meter.result()
    return results


def _compare_piece(
    meter: FidelityMeter, piece: Piece, loaded: Sequence[tuple[Backend, int]]
) -> None:
    ids = piece.token_ids
    size = min(step for _, step in loaded)
    for start in range(0, len(ids), size):
        tokens = tuple(ids[start : start + size])
        plan = StepPlan(0, (Row(0, 0, start, tokens, len(tokens)),))
        reference, package = (b.collect(b.submit(plan)).logits for b, _ in loaded)
        skipped = min(max(piece.given - 1 - start, 0), len(tokens))
        next_ids = ids[start + 1 + skipped : start + 1 + size]
        meter.add(reference[skipped:], package[skipped:], next_ids)


def _load(folder: Path, device: str, options: dict[str, Any]) -> tuple[Backend, Capabilities]:
    manifest = read_manifest(folder)
    config = EngineConfig.from_dict(options)
    chosen = choose_device(device, manifest)
    backend = create_backend(chosen, folder, manifest, config, probe_hardware())
    return backend, backend.load()


def render(report: dict[str, Any]) -> str:
    """`measure_fidelity`'s report for people."""
    lines = [
        f"{report['package']} ({report['precision']}, {report['kv_cache']} cache) "
        f"against {report['reference']}"
    ]
    for name in ("text", "answers", "sampled"):
        if name in report:
            found = report[name]
            lines.append(
                f"{name:8} {found['num_tokens']:6} tokens  KL mean {found['mean_kl_nats']:.4f}, "
                f"p99 {found['p99_kl_nats']:.4f} nats  top-1 {found['top1_agreement']:.1%}  "
                f"perplexity {_perplexity(found)}"
            )
    if (greedy := report["greedy"]) is not None:
        lines.append(
            f"greedy   {greedy['equal_share']:.0%} of the answers are equal; they part after "
            f"{greedy['mean_tokens_to_difference']:.1f} tokens of "
            f"{greedy['mean_answer_tokens']:.1f}"
        )
    return "\n".join(lines)


def _perplexity(found: dict[str, Any]) -> str:
    """Where few tokens are compared there may be none of the three."""
    if found["perplexity"] is None:
        return "-"
    error = found["perplexity_change_error"]
    known = "unknown" if error is None else f"{error:.2%}"
    change = found["perplexity"] / found["perplexity_fp32"] - 1
    return f"{found['perplexity']:.3f} ({change:+.2%}, standard error {known})"
