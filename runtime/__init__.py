"""The runtime of headrace: `from headrace.runtime import Runtime, Embedder`.

Names are loaded when they are first asked for, so that importing a part loads nothing else.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.runtime.api import Runtime
    from headrace.runtime.child.entry import freeze_support
    from headrace.runtime.config import EngineConfig, GenerationConfig
    from headrace.runtime.encoder.embedder import Embedder
    from headrace.runtime.errors import HeadraceError
    from headrace.runtime.grammar.spec import Grammar

__all__ = [
    "Embedder",
    "EngineConfig",
    "GenerationConfig",
    "Grammar",
    "HeadraceError",
    "Runtime",
    "freeze_support",
]

_HOMES = {
    "Runtime": "api",
    "EngineConfig": "config",
    "GenerationConfig": "config",
    "Embedder": "encoder.embedder",
    "Grammar": "grammar.spec",
    "HeadraceError": "errors",
    "freeze_support": "child.entry",
}

# Nothing is printed where the app has set up no logging.
logging.getLogger("headrace").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
