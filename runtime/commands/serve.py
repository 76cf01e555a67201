"""`headrace serve`: packages over HTTP, in the shape of OpenAI's API."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from typing import Any

from headrace.runtime.errors import ConfigError, HeadraceError

API_KEY_VARIABLE = "HEADRACE_API_KEY"
_NEEDED = ("starlette", "uvicorn", "pydantic", "prometheus_client")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes besides the options of the machine."""
    parser.add_argument(
        "models", nargs="+", metavar="MODEL", help="package, checkpoint, or a stored model's name"
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address (default: 127.0.0.1)")
    add("--port", type=_port, default=8000, metavar="N", help="0 for any free one (default: 8000)")
    add("--api-key", metavar="KEY", help=f"to ask for; {API_KEY_VARIABLE} keeps it out of sight")
    add(
        "--cors-origin",
        dest="cors_origins",
        action="append",
        metavar="ORIGIN",
        help="let pages of this site ask; repeatable",
    )
    add(
        "--allowed-host",
        dest="allowed_hosts",
        action="append",
        metavar="NAME",
        help="a name that this machine is reached by; repeatable",
    )
    limit = parser.add_argument_group("limits").add_argument
    limit("--max-sequences", type=int, metavar="N", help="decoded at once (default: 16)")
    limit("--max-requests", type=int, metavar="N", help="under way at once (default: 256)")
    limit("--max-tokens", type=int, metavar="N", help="longest answer (default: the context)")
    limit(
        "--memory-bytes",
        type=int,
        metavar="N",
        help="for all models together; the least used make room (default: 3/4 of what is free)",
    )
    limit("--max-body-bytes", type=int, metavar="N", help="largest request (default: 2 MiB)")
    limit("--max-buffer-bytes", type=int, metavar="N", help="for a slow reader (default: 1 MiB)")
    limit(
        "--client-timeout",
        dest="client_timeout_s",
        type=float,
        metavar="S",
        help="that a client may take to send a request, or take nothing (default: 60)",
    )
    limit(
        "--drain",
        dest="drain_s",
        type=float,
        metavar="S",
        help="that answers may go on after SIGTERM (default: 30)",
    )


def serve(args: argparse.Namespace, engine_options: dict[str, Any]) -> bool:
    """Serve until a signal ends it; whether that was Ctrl-C.

    Raises:
        ConfigError: an option is wrong, or the extra [server] is not installed.
        HeadraceError: the address or a package cannot be used.
    """
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        expected = f'{missing[0]} to be installed: pip install "headrace[server]"'
        raise ConfigError("serve", missing[0], expected)
    from headrace.runtime.commands.models import find_model
    from headrace.runtime.factory import share_threads
    from headrace.runtime.machine.memory import share_heap
    from headrace.runtime.server.app import make_app
    from headrace.runtime.server.listen import Server, listening_socket
    from headrace.runtime.server.models import Models
    from headrace.runtime.server.options import ServerOptions
    from headrace.runtime.server.packages import served_packages

    share_heap()
    key = args.api_key if args.api_key is not None else os.environ.get(API_KEY_VARIABLE)
    options = ServerOptions.from_dict({**vars(args), "api_key": key})
    engine_options = {**engine_options, "max_waiting": options.max_requests}
    if args.max_sequences is not None:
        engine_options["max_sequences"] = args.max_sequences
    found = [find_model(model, args.preset) for model in args.models]
    packages = [(model.name, model.package) for model in found]
    budget_bytes = options.memory_bytes
    if budget_bytes is None and len(packages) > 1:  # one has nobody to share with
        budget_bytes = _share_of_memory()
    served = served_packages(packages, args.device, engine_options, budget_bytes)
    models = Models(served, budget_bytes)
    if len(packages) > 1:
        share_threads(engine_options.get("num_threads"))
    listener = listening_socket(args.host, args.port)
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    if key is None and not _is_loopback(host):
        _say(f"anybody who reaches {address} may use it; set {API_KEY_VARIABLE} to ask for a key")
    _say(f"listening at {address}, loading {', '.join(models.names)}")
    server = Server(
        make_app(models, options), models, options, lambda: _say(f"ready at {address}/v1")
    )
    server.run(sockets=[listener])
    if isinstance(server.load_error, HeadraceError | OSError | MemoryError):
        raise server.load_error
    assert server.load_error is None, server.load_error
    return server.interrupted


def _share_of_memory() -> int:
    """What models may take together unless it is said: most of what this process may still have,
    in bytes."""
    from headrace.runtime.machine.hardware import probe_hardware

    return probe_hardware().available_memory_bytes * 3 // 4


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value < 65536:
        raise argparse.ArgumentTypeError(f"{value} is not in [0, 65535]")
    return value


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"


def _say(text: str) -> None:
    print(f"headrace: {text}", file=sys.stderr, flush=True)
