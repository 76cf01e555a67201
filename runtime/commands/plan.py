"""`headrace plan`: what fits where, before anything is downloaded, exported or loaded; of a package
also how this machine runs it best."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Callable

from headrace.runtime.commands.models import find_model
from headrace.runtime.commands.plan_package import plan_package, render
from headrace.runtime.errors import ConfigError
from headrace.runtime.machine.hardware import probe_hardware
from headrace.runtime.manifest import read_manifest
from headrace.runtime.planning.devices import parse_devices
from headrace.runtime.planning.models import MODELS
from headrace.runtime.planning.report import (
    plan_machine,
    plan_model,
    render_machine,
    render_model,
)
from headrace.runtime.planning.shapes import ModelShape, shape_of_package

_CONTEXT_TOKENS = 2048


def plan(args: argparse.Namespace, note_progress: Callable[[str], None]) -> int:
    """A model on devices, or what this machine can run, and how.

    Raises:
        ConfigError: an unknown model or device, or a number of devices that cannot share the model.
        StoreError: there is no such package.
        PackageError: it cannot be read.
    """
    if args.package is not None and args.model is not None:
        raise ConfigError("model", args.model, "either a package or the name of a model")
    shapes = _shapes(args)
    context = args.context_tokens
    if args.devices is None:
        free_bytes = probe_hardware().available_memory_bytes
        found = plan_machine(shapes, free_bytes, context or _CONTEXT_TOKENS)
        text = render_machine(found)
        if args.package is not None:
            ways = plan_package(find_model(args.package).package, args.sequences, note_progress)
            found["ways"] = ways
            text += "\n\n" + render(ways)
    elif len(shapes) == 1:
        count, device = parse_devices(args.devices)
        found = plan_model(shapes[0], device, count, context)
        text = render_model(found)
    else:
        raise ConfigError("model", None, "one, with --devices")
    print(json.dumps(found, indent=1) if args.json else text)
    return 0


def _shapes(args: argparse.Namespace) -> list[ModelShape]:
    if args.package is not None:
        found = find_model(args.package)
        return [shape_of_package(found.name, read_manifest(found.package).model)]
    if args.model is None:
        return list(MODELS.values())
    if args.model.lower() in MODELS:
        return [MODELS[args.model.lower()]]
    near = difflib.get_close_matches(args.model.lower(), MODELS, n=3)
    raise ConfigError("model", args.model, f"one of {', '.join(near or MODELS)}")
