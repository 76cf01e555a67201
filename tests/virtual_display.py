"""An X server without a screen, for tests of windows.

It lets in whoever has its key and nobody else, which is what Tk asks for before one application may
tell another what to do (`send`).
"""

from __future__ import annotations

import os
import secrets
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def obstacle() -> str | None:
    """Why there can be none."""
    try:
        import tkinter  # noqa: F401
    except ImportError:
        return "this Python has no tkinter (Debian and Ubuntu: python3-tk)"
    return None if shutil.which("Xvfb") else "needs Xvfb (Debian and Ubuntu: xvfb)"


@contextmanager
def virtual_display(folder: Path) -> Iterator[dict[str, str]]:
    """The environment variables of programs that are to use it. Its key is kept in `folder`."""
    key_file = folder / "xauthority"
    fields = (b"", b"", b"MIT-MAGIC-COOKIE-1", secrets.token_bytes(16))
    record = b"".join(struct.pack(">H", len(field)) + field for field in fields)
    key_file.write_bytes(struct.pack(">H", 0xFFFF) + record)  # for any address
    reading, writing = os.pipe()
    command = ["Xvfb", "-displayfd", str(writing), "-screen", "0", "800x600x24", "-nolisten", "tcp"]
    server = subprocess.Popen(
        [*command, "-auth", str(key_file)], pass_fds=[writing], stderr=subprocess.DEVNULL
    )
    os.close(writing)
    try:
        with os.fdopen(reading) as answer:
            number = answer.readline().strip()
        assert number, "Xvfb did not start"
        yield {"DISPLAY": f":{number}", "XAUTHORITY": str(key_file)}
    finally:
        server.kill()
        server.wait()
