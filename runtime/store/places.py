"""Where a user's models and packages are kept, as each system has it.

    models     what `headrace pull` fetched: user data, nothing makes it again but the network
    packages   what `headrace run FILE` made of checkpoints: a cache, made again when it is gone

`HEADRACE_HOME` moves both into one folder.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import platformdirs

from headrace.runtime.errors import StoreError

HOME_VARIABLE = "HEADRACE_HOME"

# A name becomes a folder on any system, so it is what all of them take.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}(?<![.])", re.ASCII)
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.ASCII | re.IGNORECASE)


def models_folder() -> Path:
    """Where stored models are; it need not exist."""
    return (_home() or platformdirs.user_data_path("headrace", appauthor=False)) / "models"


def packages_folder() -> Path:
    """Where packages made of checkpoints are; it need not exist."""
    return (_home() or platformdirs.user_cache_path("headrace", appauthor=False)) / "packages"


def history_file() -> Path:
    """What was typed at `headrace chat`."""
    return (_home() or platformdirs.user_state_path("headrace", appauthor=False)) / "chat_history"


def is_name(text: str) -> bool:
    """Whether this can be the name of a model, and so of a folder on any system."""
    return bool(_NAME.fullmatch(text)) and not _DEVICES.fullmatch(text)


def checked_name(name: str) -> str:
    """The name itself.

    Raises:
        StoreError: it cannot be one.
    """
    if not is_name(name):
        raise StoreError(
            f"{name!r} cannot be the name of a model: use up to 100 letters, digits, dots, dashes "
            "and underscores, a letter or digit first"
        )
    return name


def _home() -> Path | None:
    value = os.environ.get(HOME_VARIABLE)
    return Path(value).absolute() if value else None
