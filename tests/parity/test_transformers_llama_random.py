"""Random small Llama models: an exported float32 package against transformers, logit by logit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import random_models
import reference_llama
import tiny
from backend_driver import relative_error

from headrace.exporters.package import export_package

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.torch

SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.5, 1.7, 2.0],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 9.0, 12.0, 16.0],
    "original_max_position_embeddings": 40,
}

# What differs from a model of 4 heads, 2 of keys and values, float32, one weight file.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "multi_head": {"num_key_value_heads": 4},
    "multi_query_untied": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "nine_heads_three_layers": {
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 144,
        "num_hidden_layers": 3,
    },
    "wide_heads": {"head_dim": 32, "hidden_size": 64},
    "rope_theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
    "rope_linear": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    },
    "rope_dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    },
    "rope_yarn": {"rope_parameters": YARN},
    "rope_yarn_options": {
        "rope_parameters": YARN
        | {"beta_fast": 20.0, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.5}
        | {"truncate": False}
    },
    "rope_llama3": {"rope_parameters": {**LLAMA3, "rope_theta": 10_000.0}},
    "biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "bfloat16_sharded": {"dtype": "bfloat16", "shards": True, "tie_word_embeddings": False},
    "float16": {"dtype": "float16"},
    "odd_vocabulary": {"vocab_size": 307, "rms_norm_eps": 1e-6},
}


# The numpy decoder of other tests has no need of these.
UNREFERENCED = ("rope_dynamic", "rope_yarn", "rope_yarn_options")


def save_random_model(folder: Path, **options: Any) -> Any:
    """Save a random llama; returns what transformers reads back, in float32."""
    dtype, shards = options.pop("dtype", "float32"), options.pop("shards", False)
    config = transformers.LlamaConfig(**(SHAPE | options))
    return random_models.save(config, folder, dtype=dtype, shards=shards)


@pytest.mark.parametrize("name", CASES)
def test_logits(name: str, tmp_path: Path) -> None:
    """Whole prompts, decoding one by one, and ragged batches with returns, from both forms."""
    model = save_random_model(tmp_path / "hf", **CASES[name])
    files = list((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 1 if CASES[name].get("shards") else len(files) == 1
    package = tmp_path / "package"
    export_package(tmp_path / "hf", package, precision="fp32", kv_cache="fp32")

    random_models.check_parity(package, model)


def test_longrope_follows_the_context(tmp_path: Path) -> None:
    """One table for contexts that the model was trained on, another for longer ones."""
    model = save_random_model(tmp_path / "hf", rope_parameters=LONGROPE)
    package = tmp_path / "package"
    export_package(tmp_path / "hf", package, precision="fp32", kv_cache="fp32")
    random_models.check_parity(package, model, context_tokens=40)
    # transformers goes by the sequence: only from these lengths on do the two mean the same.
    random_models.check_parity(package, model, lengths=(41, 60))


@pytest.mark.parametrize("name", [name for name in CASES if name not in UNREFERENCED])
def test_reference_decoder(name: str, tmp_path: Path) -> None:
    """The numpy decoder that tests without torch rely on is the same model."""
    model = save_random_model(tmp_path, **CASES[name])
    tensors, config = tiny.read_folder(tmp_path)
    tokens = np.random.default_rng(5).integers(3, 256, 60).tolist()
    expected = random_models.logits_of(model, tokens)
    logits = reference_llama.forward(tensors, config, tokens)
    assert relative_error(logits, expected) < 2e-5


def test_tiny_checkpoint_is_read_by_transformers(tmp_path: Path) -> None:
    """What `tiny.write_tiny_llama` writes is a checkpoint for others too."""
    folder = tiny.write_tiny_llama(
        tmp_path, tied=False, shards=3, dtype="bfloat16", bias=True, rope_scaling=LLAMA3
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = list(range(3, 103))
    logits = reference_llama.forward(*tiny.read_folder(folder), tokens)
    assert relative_error(logits, random_models.logits_of(model, tokens)) < 2e-5
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "Héllo <|im_end|> 日本"
    assert tokenizer.encode(text) == tiny.tiny_tokenizer().encode(text).ids
