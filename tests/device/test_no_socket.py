"""No socket is opened, onnxruntime's own telemetry included: the kernel kills whoever tries.

onnxruntime's telemetry waits about nine seconds before it looks up its collector, so children that
are to show something about it live longer than that, side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from no_sockets import CAUGHT, obstacle, start_without_sockets

LINGER_S = 14
TIMEOUT_S = 120

pytestmark = pytest.mark.slow

GENERATE = f"""
import sys, time
started = time.monotonic()
from headrace.runtime import Runtime
with Runtime.load(sys.argv[1], device="cpu") as runtime:
    answers = runtime.generate(["one", "two"], max_new_tokens=8, temperature=0.0, ignore_eos=True)
    print(sum(len(answer.token_ids) for answer in answers), flush=True)
time.sleep(max(0, {LINGER_S} - (time.monotonic() - started)))
"""
TELEMETRY_ON = f"""
import time
import onnxruntime
onnxruntime.disable_telemetry_events()
time.sleep({LINGER_S})
"""
OPENS_A_SOCKET = {
    "IPv6": "import socket; socket.socket(socket.AF_INET6)",
    "Unix": "import socket; socket.socket(socket.AF_UNIX)",
    "in a thread": (
        "import socket, threading; t = threading.Thread(target=socket.socket); t.start(); t.join()"
    ),
    "past Python's module": "import ctypes; ctypes.CDLL(None).socket(2, 1, 0)",
}
IN_A_CHILD = """
import subprocess, sys
done = subprocess.run([sys.executable, "-c", "import socket; socket.socket()"])
sys.exit(0 if done.returncode == {caught} else 1)
"""


@pytest.fixture(autouse=True, scope="module")
def _needs_seccomp() -> None:
    if reason := obstacle():
        pytest.skip(reason)


@pytest.mark.parametrize("code", OPENS_A_SOCKET.values(), ids=OPENS_A_SOCKET.keys())
def test_a_socket_is_caught(code: str, tmp_path: Path) -> None:
    """Otherwise the tests below would show nothing."""
    with start_without_sockets(code, home=tmp_path) as child:
        child.communicate(timeout=TIMEOUT_S)
    assert child.returncode == CAUGHT


def test_a_socket_of_a_child_process_is_caught(tmp_path: Path) -> None:
    with start_without_sockets(IN_A_CHILD.format(caught=CAUGHT), home=tmp_path) as child:
        child.communicate(timeout=TIMEOUT_S)
    assert child.returncode == 0


def test_loading_and_decoding_opens_none(tiny_package: Callable[..., Path], tmp_path: Path) -> None:
    """Nor is anything written to the home folder, where the telemetry would keep its events.

    The same without headrace's opt-out, at the same time: onnxruntime opens a socket even though
    `disable_telemetry_events` was called.
    """
    package = tiny_package("w8a8_row", "int8")
    ours, plain = tmp_path / "ours", tmp_path / "plain"
    ours.mkdir()
    plain.mkdir()
    unset: dict[str, str | None] = {"ORT_DISABLE_TELEMETRY": None}
    with (
        start_without_sockets(GENERATE, package, home=ours, **unset) as headrace,
        start_without_sockets(TELEMETRY_ON, home=plain, **unset) as onnxruntime,
    ):
        answer, errors = headrace.communicate(timeout=TIMEOUT_S)
        onnxruntime.communicate(timeout=TIMEOUT_S)
    assert headrace.returncode == 0, errors.decode()[-2000:]
    assert int(answer) == 16
    assert list(ours.rglob("*")) == []
    if onnxruntime.returncode != CAUGHT:
        # The wheel may have been built without telemetry, or find no certificates here.
        pytest.skip("passed, but onnxruntime opens no socket here without the opt-out either")
