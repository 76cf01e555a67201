"""Small random models of any architecture, saved by transformers, and what it makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference_llama
import tiny
from backend_driver import ragged_schedule, relative_error, run_schedule
from numpy.typing import NDArray

LENGTHS = (1, 9, 40, 23)
TOLERANCE = 1e-3


def save(config: Any, folder: Path, *, dtype: str = "float32", shards: bool = False) -> Any:
    """Save a model with random weights and a tokenizer; what transformers reads back, in float32.

    Weights are large enough that no part of the model can be wrong without moving the logits.
    """
    torch, transformers = _libraries()
    config.bos_token_id, config.eos_token_id = tiny.BOS_ID, tiny.EOS_ID
    model = transformers.AutoModelForCausalLM.from_config(config)
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
    return load(folder)


def load(folder: Path, **options: Any) -> Any:
    """The float32 model of a folder, with the attention that is written out."""
    torch, transformers = _libraries()
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **options
    ).eval()


def logits_of(model: Any, tokens: list[int]) -> NDArray[np.float32]:
    """float32 [T, V] of one sequence, computed at once."""
    torch, _ = _libraries()
    with torch.inference_mode():
        logits: NDArray[np.float32] = model(torch.tensor([tokens])).logits[0].numpy()
    return logits


def check_parity(
    package: Path,
    model: Any,
    lengths: tuple[int, ...] = LENGTHS,
    context_tokens: int | None = None,
) -> None:
    """Whole prompts, decoding one by one, and ragged batches with returns, from both forms."""
    rng = np.random.default_rng(11)
    sequences = [rng.integers(3, 256, length).tolist() for length in lengths]
    expected = [logits_of(model, tokens) for tokens in sequences]
    schedules = {
        "prefill": [[(i, 0, n) for i, n in enumerate(lengths)]],
        "decode": [
            [(i, t, t + 1) for i, n in enumerate(lengths) if t < n] for t in range(max(lengths))
        ],
        "ragged": ragged_schedule(lengths, rng),
    }
    for kind, schedule in schedules.items():
        for form in ("ragged", "uniform"):
            logits, entropy = run_schedule(
                package, sequences, schedule, form=form, context_tokens=context_tokens
            )
            for i in range(len(sequences)):
                where = f"{kind}, {form} form, sequence {i}"
                assert relative_error(logits[i], expected[i]) < TOLERANCE, where
                nats = reference_llama.entropy_nats(expected[i].astype(np.float64))
                np.testing.assert_allclose(entropy[i], nats, atol=TOLERANCE, err_msg=where)


def _libraries() -> tuple[Any, Any]:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    return torch, transformers
