"""What the server is told when it starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.runtime.errors import ConfigError
from headrace.runtime.option_checks import integer, positive


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Frozen; checked when made.

    Attributes:
        api_key: what `Authorization: Bearer` must carry; None asks for none.
        cors_origins: pages that may use the server, such as "https://chat.example".
        allowed_hosts: names besides localhost under which it may be reached; addresses always may.
        max_requests: requests worked on or waiting at once; more get 429.
        max_body_bytes: largest body of a request.
        max_buffer_bytes: most that waits for a client that reads its stream too slowly.
        client_timeout_s: longest that a client may take to send a request, or take nothing.
        drain_s: how long answers may go on after SIGTERM.
        max_tokens: longest answer, also where a request names no limit; None is the context.
        memory_bytes: for all models that are loaded together; None leaves it to the command.

    Raises:
        ConfigError: a value is wrong; names the option of the command.
    """

    api_key: str | None = None
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_requests: int = 256
    max_body_bytes: int = 2 * 2**20
    max_buffer_bytes: int = 2**20
    client_timeout_s: float = 60.0
    drain_s: float = 30.0
    max_tokens: int | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            option = f"--{name.removesuffix('_s').replace('_', '-')}"
            object.__setattr__(self, name, check(option, getattr(self, name)))
        if self.api_key is not None and (not self.api_key or not self.api_key.isascii()):
            raise ConfigError("--api-key", "...", "a key of ASCII characters, not empty")
        for origin in self.cors_origins:
            scheme, _, host = origin.partition("://")
            if not scheme or not host or "/" in host or "*" in host:
                raise ConfigError("--cors-origin", origin, "an origin such as https://chat.example")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ServerOptions:
        """Of those that are set; other keys are the command's own."""
        names = {field.name for field in dataclasses.fields(cls)}
        given = {k: v for k, v in values.items() if k in names and v is not None}
        lists = {k: tuple(v) for k, v in given.items() if isinstance(v, list)}
        return cls(**{**given, **lists})


_CHECKS = {
    "max_requests": integer(1, 4096),
    "max_body_bytes": integer(1024, 2**30),
    "max_buffer_bytes": integer(1024, 2**30),
    "max_tokens": integer(1, optional=True),
    "memory_bytes": integer(1, optional=True),
    "client_timeout_s": positive,
    "drain_s": positive,
}
