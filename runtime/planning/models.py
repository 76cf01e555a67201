"""Models by name. Sizes are those of the config.json that their makers publish, or of the paper;
tests hold the numbers of parameters equal to the published ones."""

from __future__ import annotations

from headrace.runtime.planning.shapes import ModelShape


def _shape(
    name: str,
    layers: int,
    hidden: int,
    heads: tuple[int, int, int],
    intermediate: int,
    vocab: int,
    context_tokens: int,
    **others: object,
) -> ModelShape:
    """`heads`: of queries, of keys, and elements of each."""
    values: dict[str, object] = {"tied": False, "source": "config.json", **others}
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden=hidden,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        intermediate=intermediate,
        vocab=vocab,
        context_tokens=context_tokens,
        **values,  # type: ignore[arg-type]
    )


MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _shape("smollm2-135m", 30, 576, (9, 3, 64), 1536, 49152, 8192, tied=True),
        _shape("smollm2-360m", 32, 960, (15, 5, 64), 2560, 49152, 8192, tied=True),
        _shape("smollm2-1.7b", 24, 2048, (32, 32, 64), 8192, 49152, 8192, tied=True),
        _shape(
            "gemma-3-270m",
            18,
            640,
            (4, 1, 256),
            2048,
            262144,
            32768,
            tied=True,
            norms=4,
            head_norms=True,
        ),
        _shape(
            "qwen3-0.6b", 28, 1024, (16, 8, 128), 3072, 151936, 40960, tied=True, head_norms=True
        ),
        _shape("qwen3-8b", 36, 4096, (32, 8, 128), 12288, 151936, 40960, head_norms=True),
        _shape("qwen3-32b", 64, 5120, (64, 8, 128), 25600, 151936, 40960, head_norms=True),
        _shape("qwen2.5-7b", 28, 3584, (28, 4, 128), 18944, 152064, 32768, qkv_bias=True),
        _shape("mistral-7b-v0.3", 32, 4096, (32, 8, 128), 14336, 32768, 32768),
        _shape("llama-2-7b", 32, 4096, (32, 32, 128), 11008, 32000, 4096),
        _shape("llama-2-13b", 40, 5120, (40, 40, 128), 13824, 32000, 4096),
        _shape("llama-2-70b", 80, 8192, (64, 8, 128), 28672, 32000, 4096),
        _shape("llama-3.2-1b", 16, 2048, (32, 8, 64), 8192, 128256, 131072, tied=True),
        _shape("llama-3.2-3b", 28, 3072, (24, 8, 128), 8192, 128256, 131072, tied=True),
        _shape("llama-3.1-8b", 32, 4096, (32, 8, 128), 14336, 128256, 131072),
        _shape("llama-3.1-70b", 80, 8192, (64, 8, 128), 28672, 128256, 131072),
        _shape("llama-3.1-405b", 126, 16384, (128, 8, 128), 53248, 128256, 131072),
        _shape(
            "gpt3-175b",
            96,
            12288,
            (96, 96, 128),
            49152,
            50257,
            2048,
            tied=True,
            gated=False,
            biased=True,
            learned_positions=2048,
            source="Brown et al. (2020), table 2.1",
        ),
    )
}
