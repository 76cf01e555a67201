"""Peak memory and load time of a package, in a fresh process.

    python tools/bench/memory.py DIR [--sequences 4] [--tokens 512] [--json]

The limit is 1.3 x (weights + KV in use + 60 MB). The process (`memory_child.py`) is started twice
and the second time counts, so that the files are in the system's cache.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import resources
from pathlib import Path

import common

from headrace.runtime.manifest import read_manifest
from headrace.runtime.tokenizer import Tokenizer

NEW_TOKENS = 64
BASE_BYTES = 60_000_000
ALLOWANCE = 1.3


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("package", type=Path, metavar="DIR")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="prompt and answer together")
    args = parser.parse_args()
    given = {
        "package": str(args.package),
        "prompts": text_prompts(args.package, args.sequences, args.tokens - NEW_TOKENS),
        "max_new_tokens": NEW_TOKENS,
        "num_threads": args.threads,
    }
    command = [sys.executable, str(Path(__file__).with_name("memory_child.py"))]
    for _ in range(2):
        done = subprocess.run(
            command, input=json.dumps(given).encode(), stdout=subprocess.PIPE, check=True
        )
    target = read_manifest(args.package).targets[0]
    kv_tokens = args.sequences * args.tokens
    figures = common.report(
        {
            "weight_bytes": target.weight_bytes,
            "kv_bytes": kv_tokens * target.kv_cache.bytes_per_token,
            **json.loads(done.stdout),
        }
    )
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


def text_prompts(folder: Path, count: int, length: int) -> list[list[int]]:
    """Pieces of prose. Random tokens would touch every page of the embedding, which text does not:
    it is mapped from the file and only what is looked up becomes resident."""
    text = resources.files("headrace.exporters") / "data" / "calibration_wikitext.txt"
    tokenizer = Tokenizer.load(folder, read_manifest(folder).tokenizer)
    ids = tokenizer.encode_prompt(text.read_text(encoding="utf-8"))
    ids *= -(-count * length // len(ids))
    return [ids[i * length : (i + 1) * length] for i in range(count)]


if __name__ == "__main__":
    main()
