"""Messages between two processes: values as JSON, and bulk as the bytes it is.

A frame is the length of its header (4 bytes, little-endian), the length of its body (8 bytes), the
header, which is a JSON object, and the body. Whoever reads says how long a body may be, so that a
peer gone mad cannot ask for memory without end.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.runtime.errors import EngineProcessError

MAX_HEADER_BYTES = 16 << 20
_LENGTHS = struct.Struct("<IQ")


@dataclass(frozen=True, slots=True)
class Frame:
    """A message. `body` is valid until its channel reads the next one."""

    header: dict[str, Any]
    body: memoryview


class Pipe(Protocol):
    """An unbuffered binary file: what `open(..., buffering=0)` gives."""

    def readinto(self, buffer: memoryview, /) -> int | None: ...

    def write(self, data: memoryview, /) -> int | None: ...

    def close(self) -> None: ...


class Channel:
    """One end of two pipes. One thread sends at a time, and one receives."""

    def __init__(self, incoming: Pipe, outgoing: Pipe) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self._buffer = memoryview(bytearray())

    def send(self, header: Mapping[str, Any], *body: bytes | memoryview) -> None:
        """Write a frame whose body is these pieces, contiguous bytes each.

        Raises:
            EngineProcessError: nobody reads any more.
        """
        text = json.dumps(header, separators=(",", ":")).encode()
        assert len(text) <= MAX_HEADER_BYTES
        pieces = [memoryview(piece).cast("B") for piece in body]
        lengths = _LENGTHS.pack(len(text), sum(map(len, pieces)))
        for piece in (memoryview(lengths + text), *pieces):
            self._write(piece)

    def receive(self, max_body_bytes: int) -> Frame:
        """Wait for a frame and read it.

        Raises:
            EngineProcessError: nobody writes any more, or what came is no frame.
        """
        lengths = bytearray(_LENGTHS.size)
        self._read(memoryview(lengths))
        header_bytes, body_bytes = _LENGTHS.unpack(lengths)
        if header_bytes > MAX_HEADER_BYTES or body_bytes > max_body_bytes:
            raise EngineProcessError("sent what is no message")
        header = bytearray(header_bytes)
        self._read(memoryview(header))
        if body_bytes > len(self._buffer):
            self._buffer = memoryview(bytearray(body_bytes))
        body = self._buffer[:body_bytes]
        self._read(body)
        try:
            values = json.loads(header)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise EngineProcessError("sent what is no message")
        return Frame(values, body)

    def close(self) -> None:
        for pipe in (self._outgoing, self._incoming):
            with suppress(OSError):  # nobody is there to be told
                pipe.close()

    def _write(self, data: memoryview) -> None:
        while data:
            try:
                count = self._outgoing.write(data)
            except (OSError, ValueError) as error:  # broken or closed
                raise EngineProcessError(f"does not listen: {error}") from None
            data = data[count or 0 :]

    def _read(self, room: memoryview) -> None:
        while room:
            try:
                count = self._incoming.readinto(room)
            except (OSError, ValueError) as error:
                raise EngineProcessError(f"cannot be heard: {error}") from None
            if not count:
                raise EngineProcessError("has closed its pipe")
            room = room[count:]
