"""Peak memory and load time of a package, in a fresh process.

    python tools/bench/memory.py DIR [--sequences 4] [--tokens 512] [--json]

The limit is 1.3 x (weights + KV in use + 60 MB). The process is started twice and the second time
counts, so that the files are in the system's cache.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import common

from headrace.backends.ort_import import load_onnxruntime
from headrace.runtime import Runtime
from headrace.runtime.bench import peak_rss_bytes
from headrace.runtime.manifest import read_manifest

NEW_TOKENS = 64
BASE_BYTES = 60_000_000
ALLOWANCE = 1.3


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("package", type=Path, metavar="DIR")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="prompt and answer together")
    parser.add_argument("--child", action="store_true", help="measure in this process")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure_here(args.package, args.sequences, args.tokens, args.threads)))
        return
    command = [sys.executable, __file__, "--child", *sys.argv[1:]]
    for _ in range(2):
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    figures = common.report(json.loads(done.stdout))
    in_use = figures["weight_bytes"] + figures["kv_bytes"] + BASE_BYTES
    figures["limit_bytes"] = int(ALLOWANCE * in_use)
    figures["within_limit"] = figures["peak_rss_bytes"] <= figures["limit_bytes"]
    lines = [
        f"{title:34}{figures[key] / 1e6:10.1f} MB"
        for title, key in [
            ("weights", "weight_bytes"),
            (f"KV of {args.sequences} x {args.tokens} tokens", "kv_bytes"),
            ("peak resident, all imports done", "import_rss_bytes"),
            ("peak resident, loaded", "load_rss_bytes"),
            ("peak resident, at the end", "peak_rss_bytes"),
            (f"{ALLOWANCE} x (weights + KV + 60 MB)", "limit_bytes"),
        ]
    ]
    lines.append(f"{'Runtime.load, files in the cache':34}{figures['load_s']:10.2f} s")
    common.show(figures, lines, as_json=args.json)


def measure_here(folder: Path, sequences: int, tokens: int, threads: int | None) -> dict[str, Any]:
    """Load, decode all sequences together to their full length, and say what it took."""
    load_onnxruntime()
    import_rss_bytes = peak_rss_bytes()
    rng = random.Random(0)
    start = time.perf_counter()
    with Runtime.load(folder, max_sequences=sequences, num_threads=threads) as runtime:
        load_s, load_rss_bytes = time.perf_counter() - start, peak_rss_bytes()
        caps = runtime.capabilities
        prompts = [
            [rng.randrange(caps.vocab_size) for _ in range(tokens - NEW_TOKENS)]
            for _ in range(sequences)
        ]
        runtime.generate(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    return {
        "weight_bytes": read_manifest(folder).targets[0].weight_bytes,
        "kv_bytes": sequences * tokens * caps.kv_bytes_per_token,
        "load_s": load_s,
        "import_rss_bytes": import_rss_bytes,
        "load_rss_bytes": load_rss_bytes,
        "peak_rss_bytes": peak_rss_bytes(),
    }


if __name__ == "__main__":
    main()
