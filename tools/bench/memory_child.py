"""What `memory.py` measures: a program that imports no more than one that embeds the runtime."""

from __future__ import annotations

import json
import sys
import time

from headrace.backends.ort_import import load_onnxruntime
from headrace.runtime import Runtime
from headrace.runtime.machine.memory import peak_rss_bytes


def main() -> None:
    """Load, decode all sequences together to their full length, and say what it took."""
    given = json.load(sys.stdin)
    load_onnxruntime()
    figures: dict[str, float] = {"import_rss_bytes": peak_rss_bytes()}
    start = time.perf_counter()
    with Runtime.load(
        given["package"],
        max_sequences=len(given["prompts"]),
        num_threads=given["num_threads"],
    ) as runtime:
        figures["load_s"] = time.perf_counter() - start
        figures["load_rss_bytes"] = peak_rss_bytes()
        runtime.generate(given["prompts"], max_new_tokens=given["max_new_tokens"], ignore_eos=True)
    figures["peak_rss_bytes"] = peak_rss_bytes()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
