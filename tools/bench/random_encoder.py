"""An encoder checkpoint of a larger shape with random weights: for speed, not for meaning.

    python tools/bench/random_encoder.py DIR --like CHECKPOINT [--hidden 1024 --layers 24 ...]

The defaults are BERT-large's. Tokenizer and pooling files are copied from `--like`, a BERT.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

_NOT_COPIED = {"config.json", "model.safetensors"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--like", type=Path, required=True, metavar="CHECKPOINT")
    sizes = {"hidden": 1024, "intermediate": 4096, "layers": 24, "heads": 16}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    shutil.copytree(args.like, args.folder, ignore=_own_files(args.like))
    config = json.loads((args.like / "config.json").read_text(encoding="utf-8")) | {
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
    }
    (args.folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    pooling = args.folder / "1_Pooling" / "config.json"
    if pooling.exists():
        stated = json.loads(pooling.read_text(encoding="utf-8"))
        key = "word_embedding_dimension"
        pooling.write_text(json.dumps(stated | {key: args.hidden}) + "\n", encoding="utf-8")
    save_file(tensors(config), args.folder / "model.safetensors", {"format": "pt"})


def _own_files(top: Path) -> Callable[[str, list[str]], set[str]]:
    """For copytree: what is not copied from the folder itself; the same names below it are."""
    return lambda folder, names: set(names) & _NOT_COPIED if Path(folder) == top else set()


def tensors(config: dict[str, int]) -> dict[str, NDArray[np.float32]]:
    """Random tensors by their Hugging Face names; products keep the size of what they multiply."""
    rng = np.random.default_rng(0)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    found: dict[str, NDArray[np.float32]] = {}

    def add(name: str, *shape: int) -> None:
        values = rng.standard_normal(shape, np.float32)
        found[name] = values / np.sqrt(np.float32(shape[-1])) if len(shape) == 2 else values * 0.02

    def both(name: str, *shape: int) -> None:
        add(f"{name}.weight", *shape)
        add(f"{name}.bias", shape[0])

    def norm(name: str) -> None:
        found[f"{name}.weight"] = np.ones(hidden, np.float32)
        add(f"{name}.bias", hidden)

    add("embeddings.word_embeddings.weight", config["vocab_size"], hidden)
    add("embeddings.position_embeddings.weight", config["max_position_embeddings"], hidden)
    add("embeddings.token_type_embeddings.weight", config["type_vocab_size"], hidden)
    norm("embeddings.LayerNorm")
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            both(f"{layer}.attention.{name}", hidden, hidden)
        norm(f"{layer}.attention.output.LayerNorm")
        both(f"{layer}.intermediate.dense", inner, hidden)
        both(f"{layer}.output.dense", hidden, inner)
        norm(f"{layer}.output.LayerNorm")
    return found


if __name__ == "__main__":
    main()
