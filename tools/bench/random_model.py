"""A checkpoint of a larger model's shape with random weights: for speed and memory, not for text.

    python tools/bench/random_model.py DIR [--hidden 1536 --intermediate 8960 --layers 28 ...]

The defaults are a model of 1.5 billion weights. The tokenizer is that of another package's
`--tokenizer` folder or file, since its vocabulary has to fit. Weights are bfloat16, one file a
layer, so that making it needs the memory of one layer.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json to copy")
    sizes = {"hidden": 1536, "intermediate": 8960, "layers": 28, "heads": 12, "kv-heads": 2}
    for name, default in {**sizes, "vocab": 49152, "context": 8192}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    head_dim = args.hidden // args.heads
    index: dict[str, str] = {}

    def write(file: str, shapes: dict[str, tuple[int, ...]]) -> None:
        tensors = {name: random_tensor(rng, shape) for name, shape in shapes.items()}
        save_file(tensors, args.folder / file)
        index.update(dict.fromkeys(shapes, file))

    embed = (args.vocab, args.hidden)
    write(
        "model-ends.safetensors",
        {"model.embed_tokens.weight": embed, "model.norm.weight": (args.hidden,)},
    )
    outputs = {
        "self_attn.q_proj": (args.heads * head_dim, args.hidden),
        "self_attn.k_proj": (args.kv_heads * head_dim, args.hidden),
        "self_attn.v_proj": (args.kv_heads * head_dim, args.hidden),
        "self_attn.o_proj": (args.hidden, args.heads * head_dim),
        "mlp.gate_proj": (args.intermediate, args.hidden),
        "mlp.up_proj": (args.intermediate, args.hidden),
        "mlp.down_proj": (args.hidden, args.intermediate),
        "input_layernorm": (args.hidden,),
        "post_attention_layernorm": (args.hidden,),
    }
    for layer in range(args.layers):
        print(f"layer {layer + 1} of {args.layers}", flush=True)
        prefix = f"model.layers.{layer}"
        write(
            f"model-{layer:03}.safetensors",
            {f"{prefix}.{name}.weight": shape for name, shape in outputs.items()},
        )
    config = {
        "model_type": "llama",
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "max_position_embeddings": args.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "vocab_size": args.vocab,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    (args.folder / "config.json").write_text(json.dumps(config))
    (args.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    shutil.copy(args.tokenizer, args.folder / "tokenizer.json")


def random_tensor(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Gains of one, and matrices that keep the size of what they multiply."""
    if len(shape) == 1:
        return np.ones(shape, ml_dtypes.bfloat16)
    values = rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[1]))
    return values.astype(ml_dtypes.bfloat16)


if __name__ == "__main__":
    main()
