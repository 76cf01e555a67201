"""What is served: loaded one after another while the server already answers, closed at its end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from headrace.runtime.api import Runtime
from headrace.runtime.encoder.embedder import Embedder
from headrace.runtime.errors import ConfigError
from headrace.runtime.manifest import ENCODER_KIND, read_raw_manifest
from headrace.runtime.server.problems import ApiError

logger = logging.getLogger(__name__)

Model = Runtime | Embedder
Loader = Callable[[], Model]
Kind = TypeVar("Kind", Runtime, Embedder)

_DOES = {Runtime: "generate text", Embedder: "make embeddings"}


class Models:
    """Models by the names that requests call them. Thread-safe.

    Args:
        loaders: how each is made. What they make is closed by `close`.
    """

    def __init__(self, loaders: Mapping[str, Loader]) -> None:
        self.names = tuple(loaders)
        self.created_s = int(time.time())
        self._loaders = dict(loaders)
        self._loaded: dict[str, Model] = {}
        self._lock = threading.Lock()  # of loading and closing
        self._is_closed = False

    @property
    def loaded(self) -> Mapping[str, Model]:
        """Those that are there, by name."""
        return dict(self._loaded)

    @property
    def status(self) -> str:
        """ "ok" where every model answers, else "loading", "failed" or "closed"."""
        if self._is_closed:
            return "closed"
        if len(self._loaded) < len(self.names):
            return "loading"
        runtimes = (m for m in self._loaded.values() if isinstance(m, Runtime))
        return "failed" if any(runtime.closed for runtime in runtimes) else "ok"

    def load(self) -> None:
        """Load all of them; stops early when they are closed meanwhile.

        Raises:
            HeadraceError: as the loaders do. Those before stay loaded.
        """
        for name, loader in self._loaders.items():
            with self._lock:
                if self._is_closed:
                    return
                self._loaded[name] = loader()
            logger.info("loaded %s", name)

    def close(self) -> None:
        """End what they do and give the memory back; waits for a model that is being loaded."""
        self._is_closed = True
        with self._lock:
            for model in self._loaded.values():
                model.close()

    def get(self, name: str | None, kind: type[Kind]) -> tuple[str, Kind]:
        """The model that a request asks for, and its name.

        Args:
            name: None for the only one of this kind.

        Raises:
            ApiError: there is no such model (404), it does something else (400), or it is not
                loaded yet (503).
        """
        if name is None:
            name = self._only(kind)
        elif name not in self.names:
            message = f"there is no model {name!r} here; there is {', '.join(self.names)}"
            raise ApiError(404, message, code="model_not_found", param="model")
        model = self._loaded.get(name)
        if self._is_closed:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if model is None:
            raise ApiError(503, f"{name} is being loaded; try again", code="model_loading")
        if not isinstance(model, kind):
            raise ApiError(400, f"{name} cannot {_DOES[kind]}", param="model")
        return name, model

    def _only(self, kind: type[Kind]) -> str:
        """The name of the only model of a kind, or of any while they are loaded."""
        names = [n for n, model in self._loaded.items() if isinstance(model, kind)]
        if len(names) == 1 or self.status != "ok":
            return names[0] if names else self.names[0]
        problem = f"say which model is meant: {', '.join(names)}"
        if not names:
            problem = f"no model here can {_DOES[kind]}"
        raise ApiError(400, problem, param="model")


def folder_loaders(
    packages: Sequence[tuple[str, Path]], device: str, engine_options: Mapping[str, Any]
) -> dict[str, Loader]:
    """How to load packages, by their names.

    Args:
        packages: name and folder of each.

    Raises:
        ConfigError: two have one name.
        PackageError: a folder is no package.
    """
    loaders: dict[str, Loader] = {}
    for name, folder in packages:
        raw, _ = read_raw_manifest(folder)
        if name in loaders:
            raise ConfigError("MODEL", str(folder), f"one model of the name {name}; rename it")
        is_encoder = raw.get("kind") == ENCODER_KIND
        loaders[name] = (
            _encoder_loader(folder, engine_options.get("num_threads"))
            if is_encoder
            else _runtime_loader(folder, device, engine_options)
        )
    return loaders


def _encoder_loader(folder: Path, num_threads: int | None) -> Loader:
    return lambda: Embedder.load(folder, num_threads=num_threads)


def _runtime_loader(folder: Path, device: str, options: Mapping[str, Any]) -> Loader:
    return lambda: Runtime.load(folder, device, **options)
