"""Every exception that headrace raises on purpose.

    HeadraceError
    ├── ConfigError (ValueError)          an option's value is wrong: names field, value and range
    ├── RequestError (ValueError)         one request is refused; others go on
    │   ├── PromptTooLongError            more tokens than the context holds
    │   ├── TemplateError                 the chat template failed or left its sandbox
    │   └── QueueFullError                try again later
    ├── CheckpointError                   the exporter's source cannot be used
    │   └── UnsupportedArchitectureError  names it and lists the known ones
    ├── ExportError                       writing the package failed; nothing is left behind
    ├── PackageError                      a package is missing something or was changed
    ├── BackendError                      the device or ONNX Runtime failed
    │   ├── BackendUnavailableError       asked for by name and cannot be had
    │   ├── InsufficientMemoryError       would not fit: needed, free, what to change
    │   └── EngineProcessError            a process that works for an engine died
    ├── EngineClosedError                 the runtime was closed
    ├── StoreError                        a stored model cannot be found, fetched or removed
    └── ServeError                        the server cannot listen where it was told to

A message is one line: what is wrong, with which thing, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable


class HeadraceError(Exception):
    """Base of the tree. Command line tools print its message and exit with 1."""


class ConfigError(HeadraceError, ValueError):
    """An option's value is out of range or an option is unknown."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        self.field, self.value, self.expected = field, value, expected
        super().__init__(f"{field}={value!r} is not valid: expected {expected}")


class RequestError(HeadraceError, ValueError):
    """A single request cannot be served."""


class PromptTooLongError(RequestError):
    """The prompt leaves no room for a new token in the context."""

    def __init__(self, prompt_tokens: int, context_tokens: int) -> None:
        self.prompt_tokens, self.context_tokens = prompt_tokens, context_tokens
        super().__init__(
            f"the prompt has {prompt_tokens} tokens, but the context holds {context_tokens} "
            "and at least one must stay free for the answer; shorten the prompt"
        )


class TemplateError(RequestError):
    """The chat template raised, took too long, or tried to leave its sandbox."""


class QueueFullError(RequestError):
    """The bounded queue of waiting requests is full."""


class CheckpointError(HeadraceError):
    """The source is not a checkpoint, is damaged, or holds something that cannot be used."""


class UnsupportedArchitectureError(CheckpointError):
    """No exporter knows this architecture."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name, self.known = name, tuple(sorted(known))
        super().__init__(
            f"architecture {name!r} is not supported; known ones: {', '.join(self.known)}"
        )


class ExportError(HeadraceError):
    """The package could not be written or would break its own promise."""


class PackageError(HeadraceError):
    """A package folder cannot be read."""


class BackendError(HeadraceError):
    """The device or its runtime failed while loading or running."""


class BackendUnavailableError(BackendError):
    """A device was asked for by name and is not usable here."""


class InsufficientMemoryError(BackendError):
    """Loading or admitting would need more memory than this process may use."""

    def __init__(self, needed_bytes: int, free_bytes: int, remedy: str) -> None:
        self.needed_bytes, self.free_bytes = needed_bytes, free_bytes
        super().__init__(
            f"needs {needed_bytes / 2**20:.0f} MiB of memory, "
            f"{free_bytes / 2**20:.0f} MiB are free; {remedy}"
        )


class EngineProcessError(BackendError):
    """A process that works for an engine died, or does not make sense any more; what it had in
    memory, keys and values above all, is lost."""


class EngineClosedError(HeadraceError):
    """The runtime was closed while or before the call was made."""


class StoreError(HeadraceError):
    """A name or an address leads to no model, or a model cannot be fetched or removed."""


class ServeError(HeadraceError):
    """The address is wrong, taken, or needs rights that the user lacks."""
