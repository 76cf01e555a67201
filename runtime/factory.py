"""From a package folder to a running `Runtime`: the one place where runtime and backends meet."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.backends import ort_session
from headrace.backends.base import Backend
from headrace.backends.cpu_avx512.encoder import CpuEncoder
from headrace.backends.cpu_avx512.threads import choose_threads
from headrace.backends.heads import CpuHeads
from headrace.backends.isolated.backend import IsolatedBackend
from headrace.backends.registry import choose_device, create_backend, is_split
from headrace.backends.targets import choose_target
from headrace.runtime.api import Runtime
from headrace.runtime.config import EngineConfig, GenerationConfig
from headrace.runtime.draft_heads import DraftHeads
from headrace.runtime.encoder.embedder import Embedder, load_tokenizer
from headrace.runtime.encoder.manifest import read_encoder_manifest
from headrace.runtime.engine import Engine
from headrace.runtime.errors import PackageError
from headrace.runtime.footprint import Footprint, decoder_footprint, encoder_footprint
from headrace.runtime.grammar.matcher import GrammarCompiler
from headrace.runtime.machine.hardware import probe_hardware
from headrace.runtime.machine.memory import trim_heap
from headrace.runtime.manifest import Manifest, is_encoder_package, package_path, read_manifest
from headrace.runtime.pipeline import ThreadedBackend
from headrace.runtime.text import TextStream
from headrace.runtime.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

GENERATION_CONFIG_FILE = "generation_config.json"


def load_runtime(folder: Path, device: str, config: EngineConfig) -> Runtime:
    """See `Runtime.load`."""
    manifest = read_manifest(folder)
    tokenizer = Tokenizer.load(folder, manifest.tokenizer)
    template = read_chat_template(folder, manifest)
    defaults = GenerationConfig.from_defaults(_generation_defaults(folder, manifest))

    def make_text(request: GenerationConfig) -> TextStream:
        return TextStream(tokenizer, request.stop, request.include_stop_str_in_output)

    draft = None
    if config.draft_package is not None:
        draft = _draft_backend(folder, manifest, tokenizer, config, Path(config.draft_package))
    backend = _backend(device, folder, manifest, config)
    if config.pipeline_depth > 1 and not config.isolated:  # a process works beside us anyway
        backend = ThreadedBackend(backend)
    try:
        eos_token_ids = manifest.tokenizer.eos_token_ids
        grammars = GrammarCompiler(tokenizer, manifest.model.vocab_size, eos_token_ids)
        engine = Engine(
            backend,
            make_text,
            eos_token_ids,
            config,
            grammars=grammars,
            draft_backend=draft,
            draft_heads=_draft_heads(folder, manifest, config),
        )
        runtime = Runtime(engine, tokenizer, default_config=defaults, chat_template=template)
    except BaseException:
        backend.close()
        if draft is not None:
            draft.close()
        raise
    trim_heap()
    caps = runtime.capabilities
    logger.info(
        "loaded %s on %s: %d slots, context %d, room for %d tokens of KV",
        folder,
        caps.name,
        caps.max_slots,
        caps.context_tokens,
        caps.kv_budget_tokens,
    )
    return runtime


def share_threads(num_threads: int | None) -> None:
    """Have all models of this process share threads. Once, before the first is loaded.

    Args:
        num_threads: as of `EngineConfig`.

    Raises:
        ConfigError: there cannot be so many.
    """
    ort_session.share_threads(choose_threads(probe_hardware(), num_threads).num_threads)


def _backend(device: str, folder: Path, manifest: Manifest, config: EngineConfig) -> Backend:
    if config.isolated:
        return IsolatedBackend(device, folder, config)
    chosen = choose_device(device, manifest)
    return create_backend(chosen, folder, manifest, config, probe_hardware())


def _draft_backend(
    folder: Path, manifest: Manifest, tokenizer: Tokenizer, config: EngineConfig, draft: Path
) -> Backend:
    """Of the draft package, not loaded yet; on the CPU, with one thread: threads that wait for the
    next step of one model would be in the way of the other's.

    Raises:
        PackageError: it cannot be read, or its tokens are others than those of `folder`.
        BackendUnavailableError: it has no graphs for the CPU.
    """
    small = read_manifest(draft)
    reason, size = None, manifest.model.vocab_size
    if small.model.vocab_size != size:
        reason = f"it has {small.model.vocab_size} tokens, not {size}"
    elif not Tokenizer.load(draft, small.tokenizer).has_tokens_of(tokenizer):
        reason = "its tokens have other ids"
    if reason is not None:
        raise PackageError(
            f"{draft} cannot draft for {folder}: {reason}; use a smaller model of the same family"
        )
    options = replace(
        config,
        draft_package=None,
        target=None,
        form=None,
        stages=1,
        micro_batches=1,
        num_threads=1,
    )
    return _backend("cpu", draft, small, options)


def _draft_heads(folder: Path, manifest: Manifest, config: EngineConfig) -> DraftHeads | None:
    """Those of the target that the CPU runs, if it has some and drafts are wanted.

    Raises:
        PackageError: they cannot be read.
    """
    cpu = [target for target in manifest.targets if target.device == "cpu"]
    wanted = config.target or (cpu[0].name if cpu else None)
    target = next((target for target in cpu if target.name == wanted), None)
    if target is None or target.heads is None or config.max_draft_tokens == 0:
        return None
    hidden_size = manifest.model.hidden_size
    return DraftHeads(CpuHeads(folder, target, hidden_size, probe_hardware()))


def load_embedder(folder: Path, num_threads: int | None) -> Embedder:
    """See `Embedder.load`."""
    manifest = read_encoder_manifest(folder)
    tokenizer = load_tokenizer(folder, manifest)
    encoder = CpuEncoder(folder, manifest, num_threads, probe_hardware())
    trim_heap()
    logger.info("loaded %s on %s", folder, encoder.name)
    return Embedder(encoder, tokenizer, manifest)


def package_footprint(folder: Path, device: str, config: EngineConfig) -> Footprint:
    """What a package would take of this machine's memory; nothing that counts where it runs on a
    card, which has its own.

    Args:
        device, config: as `load_runtime` takes them.

    Raises:
        PackageError: it cannot be read.
        ConfigError, BackendUnavailableError: there is no such target or device.
    """
    if is_encoder_package(folder):
        targets = [t for t in read_encoder_manifest(folder).targets if t.device == "cpu"]
        return encoder_footprint(targets[0]) if targets else Footprint(0)
    manifest = read_manifest(folder)
    found = Footprint(0)
    if choose_device(device, manifest) == "cpu":
        ranks = is_split("cpu", manifest, config.target)
        target = choose_target(folder, manifest, "cpu", config.target, ranks=ranks)
        found = decoder_footprint(manifest.model, target, config)
    if config.draft_package is not None:
        options = replace(config, draft_package=None, target=None)
        found = found.with_draft(package_footprint(Path(config.draft_package), "cpu", options))
    return found


def read_chat_template(folder: Path, manifest: Manifest) -> str | None:
    """Source of the package's chat template; None where it has none."""
    name = manifest.tokenizer.chat_template
    return None if name is None else _read_text(package_path(folder, name))


def _generation_defaults(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """The model's generation_config.json; empty where the package has none."""
    if all(info.path != GENERATION_CONFIG_FILE for info in manifest.files):
        return {}
    path = package_path(folder, GENERATION_CONFIG_FILE)
    try:
        values = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise PackageError(f"{path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise PackageError(f"{path} is not a JSON object")
    return values


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise PackageError(f"{path} cannot be read: {error}") from None
