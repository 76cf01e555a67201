"""What a frozen app needs of headrace, much of which is imported by name only when it is needed."""

from PyInstaller.utils.hooks import (
    collect_dynamic_libs,
    collect_submodules,
)


def _is_part_of_an_app(name: str) -> bool:
    """Commands and the server are not, nor is what waits for its own packages."""
    left_out = ("commands", "server", "store", "cli", "pyinstaller")
    return not any(name.startswith(f"headrace.runtime.{part}") for part in left_out)


hiddenimports = [
    *collect_submodules("headrace.runtime", filter=_is_part_of_an_app),
    *collect_submodules("headrace.backends"),
    "onnxruntime",
]
binaries = collect_dynamic_libs("onnxruntime")
# What reads graphs and makes them, and decodes nothing.
_TOOLS = ("quantization", "tools", "transformers")
excludedimports = ["onnx", *(f"onnxruntime.{name}" for name in _TOOLS)]
