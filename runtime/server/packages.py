"""Packages as models to serve: how each is loaded, and what it takes of a budget of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.runtime.api import Runtime
from headrace.runtime.config import EngineConfig
from headrace.runtime.encoder.embedder import Embedder
from headrace.runtime.errors import ConfigError
from headrace.runtime.factory import load_embedder, load_runtime, package_footprint
from headrace.runtime.footprint import divide
from headrace.runtime.manifest import is_encoder_package
from headrace.runtime.server.residents import Served


def served_packages(
    packages: Sequence[tuple[str, Path]],
    device: str,
    engine_options: Mapping[str, Any],
    budget_bytes: int | None,
) -> dict[str, Served]:
    """How to load packages, by their names.

    Args:
        packages: name and folder of each.
        engine_options: fields of `EngineConfig`.
        budget_bytes: of memory for all together, which keys and values are held to; None leaves
            those to the engines.

    Raises:
        ConfigError: two have one name, or one does not fit even alone.
        PackageError: a folder is no package.
    """
    folders: dict[str, Path] = {}
    for name, folder in packages:
        if name in folders:
            raise ConfigError("MODEL", str(folder), f"one model of the name {name}; rename it")
        folders[name] = folder
    config = EngineConfig.from_dict(engine_options)
    if budget_bytes is None:
        return {name: _served(folder, device, config, 0) for name, folder in folders.items()}
    footprints = {n: package_footprint(folder, device, config) for n, folder in folders.items()}
    for name, footprint in footprints.items():
        if footprint.least_bytes > budget_bytes:
            raise ConfigError(
                "--memory-bytes",
                budget_bytes,
                f"at least {footprint.least_bytes}, which {name} takes alone with room for one "
                "sequence; lower --context-tokens or --max-sequences, or raise it",
            )
    served = {}
    parts = divide(list(footprints.values()), budget_bytes)
    for (name, footprint), tokens in zip(footprints.items(), parts, strict=True):
        kv_bytes = tokens * footprint.kv_token_bytes or None
        own = replace(config, kv_budget_bytes=kv_bytes)
        served[name] = _served(folders[name], device, own, footprint.need_bytes(tokens))
    return served


def _served(folder: Path, device: str, config: EngineConfig, need_bytes: int) -> Served:
    if is_encoder_package(folder):
        return Served(lambda: load_embedder(folder, config.num_threads), Embedder, need_bytes)
    return Served(lambda: load_runtime(folder, device, config), Runtime, need_bytes)
