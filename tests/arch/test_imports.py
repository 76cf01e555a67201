"""Who may import whom: the table of docs/architecture.md, made executable."""

from __future__ import annotations

import subprocess
import sys

import pytest
from sources import INSTALLED, Source, imports, sources, within

STDLIB = tuple(sys.stdlib_module_names)
LEAVES = (
    "core",
    "errors",
    "config",
    "option_checks",
    "grammar.spec",
    "manifest",
    "rank_info",
    "ring",
    "encoder.manifest",
    "machine",
    "child",
)

# What exporters and runtime have in common: the package, errors, and how both judge a package.
EXPORTERS_SHARE = (
    "runtime.manifest",
    "runtime.encoder.manifest",
    "runtime.errors",
    "runtime.fidelity",
    "runtime.rank_info",
    "runtime.shares",
    "runtime.text_files",
)

# Module prefix -> what of headrace it may import. The longest prefix that fits decides.
ALLOWED: dict[str, tuple[str, ...]] = {
    "runtime": ("runtime", "backends.base"),
    "runtime.core": (),
    "runtime.errors": (),
    **{f"runtime.{leaf}": tuple(f"runtime.{name}" for name in LEAVES) for leaf in LEAVES[2:]},
    "runtime.scheduling": (
        "runtime.core",
        "runtime.errors",
        "runtime.drafting",
        "runtime.scheduling",
    ),
    "runtime.drafting": ("runtime.core", "runtime.drafting"),
    "runtime.store": ("runtime.store", "runtime.manifest", "runtime.errors"),
    "runtime.factory": ("runtime", "backends"),
    "runtime.commands.doctor": ("runtime", "backends"),
    "runtime.commands.bench": ("runtime", "backends"),
    "runtime.commands.bench_fidelity": ("runtime", "backends"),
    "backends": ("backends", *(f"runtime.{leaf}" for leaf in LEAVES)),
    "backends.base": tuple(f"runtime.{leaf}" for leaf in LEAVES),
    "exporters": ("exporters", *EXPORTERS_SHARE),
    # Calibrating on conversations needs the model's own rendering of them.
    "exporters.calibrate": ("exporters", *EXPORTERS_SHARE, "runtime.chat"),
    # Heads learn from what the engine writes.
    "exporters.heads.collect": ("exporters", "runtime", "backends"),
    # One import of ONNX Runtime for all: its environment has to be set before.
    "exporters.validate": (
        "exporters",
        *EXPORTERS_SHARE,
        "backends.ort_import",
    ),
    # Vectors are judged after the pooling that users get.
    "exporters.encoder_runner": (
        "exporters",
        *EXPORTERS_SHARE,
        "backends.ort_import",
        "runtime.encoder.pooling",
    ),
}

# Foreign package -> where it may be imported. A package that is not here may be imported nowhere.
FOREIGN: dict[str, tuple[str, ...]] = {
    "numpy": (
        "runtime.sampling",
        "runtime.grammar.matcher",
        "runtime.fidelity",
        "runtime.encoder.pooling",
        "runtime.encoder.embedder",
        "backends",
        "exporters",
    ),
    "onnxruntime": ("backends",),
    "llguidance": ("runtime.grammar.matcher",),
    "tokenizers": ("runtime.tokenizer", "runtime.encoder.embedder", "exporters"),
    "jinja2": ("runtime.chat",),
    "cpuinfo": ("runtime.machine.topology",),
    "psutil": ("runtime.machine.hardware", "runtime.machine.memory", "runtime.server.lanes"),
    "pynvml": ("runtime.commands.doctor",),
    "onnx_ir": ("exporters",),
    "gguf": ("exporters.checkpoint",),
    "safetensors": ("exporters.checkpoint", "exporters.heads", "exporters.train"),
    "torch": ("exporters.train", "backends.tensor_parallel.gloo"),
    "platformdirs": ("runtime.store.places",),
    "filelock": ("runtime.store", "runtime.commands.answer_file"),
    "PyInstaller": ("runtime.pyinstaller",),
    "rich": ("exporters.cli",),
    "pydantic": ("runtime.server",),
    "starlette": ("runtime.server",),
    "uvicorn": ("runtime.server.listen",),
    "prometheus_client": ("runtime.server.metrics",),
    "opentelemetry": ("runtime.server.tracing",),
}


# Part of headrace -> the only modules outside of it that may import it.
IMPORTED_BY: dict[str, tuple[str, ...]] = {
    "runtime.server": ("runtime.commands.serve",),
    "runtime.store": ("runtime.commands",),
}


def allowed_headrace(module: str) -> tuple[str, ...]:
    """The rule that decides for this module."""
    prefix = max((p for p in ALLOWED if within(module, (p,))), key=len)
    return ALLOWED[prefix]


def import_problem(module: str, imported: str) -> str | None:
    """What is wrong with one import; None if nothing is."""
    if imported.startswith("."):
        return f"relative import {imported}; write the full name"
    if imported == "__future__" or within(imported, STDLIB):
        return None
    if within(imported, ("headrace",)):
        target = imported.removeprefix("headrace.")
        for part, importers in IMPORTED_BY.items():
            if within(target, (part,)) and not within(module, (part, *importers)):
                return f"{module} may not import {part}"
        own_package = target.startswith(f"{module}.")
        if own_package or within(target, allowed_headrace(module)) or module == target:
            return None
        return f"{module} may not import {target}"
    package = imported.split(".")[0]
    if package not in FOREIGN:
        return f"{package} is no package that headrace may use"
    return None if within(module, FOREIGN[package]) else f"{module} may not import {package}"


@pytest.mark.parametrize("source", sources(*INSTALLED), ids=lambda source: source.module)
def test_module_imports_only_what_its_place_allows(source: Source) -> None:
    problems = [
        f"{source.name}:{line}: {problem}"
        for line, name in imports(source.tree)
        if (problem := import_problem(source.module, name))
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("runtime.scheduling.scheduler", "numpy"),
        ("runtime.scheduling.scheduler", "headrace.runtime.engine.Engine"),
        ("runtime.core", "headrace.runtime.errors.ConfigError"),
        ("runtime.engine", "headrace.backends.registry.create_backend"),
        ("runtime.engine", "headrace.exporters.package.export_package"),
        ("runtime.engine", "onnxruntime"),
        ("backends.base", "headrace.backends.fake.FakeBackend"),
        ("backends.cpu_avx512.backend", "headrace.runtime.engine.Engine"),
        ("exporters.package", "headrace.runtime.api.Runtime"),
        ("exporters.package", "torch"),
        ("runtime.api", ".engine"),
        ("runtime.cli", "rich.console"),
        ("runtime.api", "headrace.runtime.server.app.make_app"),
        ("runtime.commands.chat", "headrace.runtime.server.app.make_app"),
    ],
)
def test_the_rules_refuse(module: str, imported: str) -> None:
    assert import_problem(module, imported)


def test_permissions_for_foreign_packages_are_used() -> None:
    used = {
        (name.split(".")[0], source.module)
        for source in sources(*INSTALLED)
        for _, name in imports(source.tree)
    }
    idle = [
        (package, place)
        for package, places in FOREIGN.items()
        for place in places
        if not any(p == package and within(m, (place,)) for p, m in used)
    ]
    assert not idle


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("core", ("numpy", "onnxruntime", "tokenizers", "jinja2", "psutil")),
        ("errors", ("numpy", "onnxruntime", "tokenizers")),
        ("scheduling.scheduler", ("numpy", "onnxruntime", "tokenizers")),
        ("scheduling.fairness", ("numpy", "onnxruntime", "tokenizers")),
        ("scheduling.slots", ("numpy", "onnxruntime", "tokenizers")),
        ("api", ("onnxruntime", "asyncio", "ssl")),
        ("cli", ("numpy", "onnxruntime", "tokenizers", "jinja2")),
        ("child.entry", ("numpy", "onnxruntime", "tokenizers", "jinja2", "psutil")),
    ],
)
def test_importing_it_does_not_load(module: str, absent: tuple[str, ...]) -> None:
    code = (
        f"import sys, headrace.runtime.{module}; print([m for m in {absent!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_what_folders_of_tests_share_lies_above_them() -> None:
    """Else it is found only after the tests of its own folder, or when all of them are run."""
    homes: dict[str, set[str]] = {}
    for source in sources("tests"):
        homes.setdefault(source.path.stem, set()).add(source.path.parent.name)
    for source in sources("tests"):
        folder = source.path.parent.name
        for line, name in imports(source.tree):
            found = homes.get(name.split(".")[0])
            assert found is None or {folder, "tests"} & found, (
                f"{source.name}:{line} imports {name} of {', '.join(sorted(found))}: "
                "move it to tests/"
            )
