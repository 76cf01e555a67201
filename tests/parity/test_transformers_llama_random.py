"""Random small Llama models: an exported float32 package against transformers, logit by logit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference_llama
import tiny
from backend_driver import ragged_schedule, relative_error, run_schedule
from numpy.typing import NDArray

from headrace.exporters.package import export_package

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.torch

TOLERANCE = 1e-3
LENGTHS = (1, 9, 40, 23)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
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
    "rope_llama3": {"rope_parameters": {**LLAMA3, "rope_theta": 10_000.0}},
    "biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "bfloat16_sharded": {"dtype": "bfloat16", "shards": True, "tie_word_embeddings": False},
    "float16": {"dtype": "float16"},
    "odd_vocabulary": {"vocab_size": 307, "rms_norm_eps": 1e-6},
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def save_random_model(
    folder: Path, *, dtype: str = "float32", shards: bool = False, **options: Any
) -> Any:
    """Save a random model with a tokenizer; returns what transformers reads back, in float32."""
    shape = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "bos_token_id": tiny.BOS_ID,
        "eos_token_id": tiny.EOS_ID,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(shape | options)))
    noise = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            is_matrix = parameter.ndim == 2
            scale = 2 / parameter.shape[-1] ** 0.5 if is_matrix else 0.2
            values = torch.randn(parameter.shape, generator=noise) * scale
            parameter.copy_(values if is_matrix else parameter + values)
    model.to(getattr(torch, dtype)).save_pretrained(
        folder, max_shard_size="60KB" if shards else "1GB"
    )
    tiny.tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def transformers_logits(model: Any, tokens: list[int]) -> NDArray[np.float32]:
    """float32 [T, V] of one sequence, computed at once."""
    with torch.inference_mode():
        logits: NDArray[np.float32] = model(torch.tensor([tokens])).logits[0].numpy()
    return logits


@pytest.mark.parametrize("name", CASES)
def test_logits(name: str, tmp_path: Path) -> None:
    """Whole prompts, decoding one by one, and ragged batches with returns, from both forms."""
    model = save_random_model(tmp_path / "hf", **CASES[name])
    files = list((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 1 if CASES[name].get("shards") else len(files) == 1
    package = tmp_path / "package"
    export_package(tmp_path / "hf", package, precision="fp32", kv_cache="fp32")

    rng = np.random.default_rng(11)
    sequences = [rng.integers(3, 256, length).tolist() for length in LENGTHS]
    expected = [transformers_logits(model, tokens) for tokens in sequences]
    longest = max(LENGTHS)
    schedules = {
        "prefill": [[(i, 0, n) for i, n in enumerate(LENGTHS)]],
        "decode": [[(i, t, t + 1) for i, n in enumerate(LENGTHS) if t < n] for t in range(longest)],
        "ragged": ragged_schedule(LENGTHS, rng),
    }
    for kind, schedule in schedules.items():
        for form in ("ragged", "uniform"):
            logits, entropy = run_schedule(package, sequences, schedule, form=form)
            for i in range(len(sequences)):
                where = f"{kind}, {form} form, sequence {i}"
                assert relative_error(logits[i], expected[i]) < TOLERANCE, where
                nats = reference_llama.entropy_nats(expected[i].astype(np.float64))
                np.testing.assert_allclose(entropy[i], nats, atol=TOLERANCE, err_msg=where)


@pytest.mark.parametrize("name", CASES)
def test_reference_decoder(name: str, tmp_path: Path) -> None:
    """The numpy decoder that tests without torch rely on is the same model."""
    model = save_random_model(tmp_path, **CASES[name])
    tensors, config = tiny.read_folder(tmp_path)
    tokens = np.random.default_rng(5).integers(3, 256, 60).tolist()
    expected = transformers_logits(model, tokens)
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
    assert relative_error(logits, transformers_logits(model, tokens)) < 2e-5
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "Héllo <|im_end|> 日本"
    assert tokenizer.encode(text) == tiny.tiny_tokenizer().encode(text).ids
