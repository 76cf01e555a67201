"""Text files that a user names on a command line."""

from __future__ import annotations

from pathlib import Path

from headrace.runtime.errors import ConfigError


def read_text(path: Path, option: str) -> str:
    """The file's text, UTF-8 with or without a byte order mark.

    Raises:
        ConfigError: naming `option`: the file cannot be read, is not text, or has none in it.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeError:
        raise ConfigError(option, str(path), "a UTF-8 text; this file is not one") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(option, str(path), f"a file that can be read ({reason})") from None
    if "\0" in text:  # valid UTF-8, but of no text
        raise ConfigError(option, str(path), "a UTF-8 text; this file is binary")
    if not text.strip():
        raise ConfigError(option, str(path), "a text; this file is empty")
    return text
