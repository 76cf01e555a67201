"""GGUF files: configuration, names, layout and every tensor type."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_samples import (
    CONTEXT,
    FFN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    VOCAB,
    hf_tensors,
    write_gguf,
)
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import _type_traits, dequantize, quantize
from numpy.typing import NDArray
from smollm2 import require_checkpoint

from headrace.exporters.checkpoint import gguf_data
from headrace.exporters.checkpoint.source import Checkpoint, open_checkpoint
from headrace.exporters.checkpoint.values import LazyTensor
from headrace.runtime.errors import CheckpointError

Bytes = NDArray[np.uint8]
BLOCK_TYPES = [Type.Q4_0, Type.Q4_1, Type.Q8_0]
QUERY = "model.layers.1.self_attn.q_proj.weight"


def test_config_has_hugging_face_keys(tmp_path: Path) -> None:
    with open_checkpoint(write_gguf(tmp_path / "m.gguf")) as checkpoint:
        assert checkpoint.format == "gguf"
        assert checkpoint.config == {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": FFN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": pytest.approx(1e-5),
            "rope_theta": 50000.0,
            "rope_scaling": None,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
        }


@pytest.mark.parametrize("options", [{}, {"tied": False}, {"bias": True}])
def test_tensors_come_back_as_they_were_before_conversion(
    tmp_path: Path, options: dict[str, bool]
) -> None:
    original = hf_tensors(**options)
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors=original)) as checkpoint:
        assert set(checkpoint.tensors) == set(original)
        for name, expected in original.items():
            tensor = checkpoint.tensors[name]
            loaded = tensor.load()
            assert (tensor.name, tensor.shape, tensor.dtype) == (name, expected.shape, "F32")
            assert loaded.dtype == np.float32 and loaded.flags.writeable
            np.testing.assert_array_equal(loaded, expected, err_msg=name)
        assert checkpoint.config["tie_word_embeddings"] == options.get("tied", True)
        assert checkpoint.config["attention_bias"] == options.get("bias", False)


@pytest.mark.parametrize("kind", [*BLOCK_TYPES, Type.F16, Type.BF16, Type.Q5_1])
def test_rows_are_reordered_in_both_views(tmp_path: Path, kind: Type) -> None:
    """Quantization works row by row, so quantizing the original gives what must come back."""
    path = write_gguf(tmp_path / "m.gguf", matrix_type=kind)
    with open_checkpoint(path) as checkpoint:
        for name, weight in hf_tensors().items():
            if weight.ndim == 2:
                expected = dequantize(quantize(weight, kind), kind)
                np.testing.assert_array_equal(checkpoint.tensors[name].load(), expected)
                blocks = checkpoint.tensors[name].blocks()
                assert (blocks is not None) == (kind in BLOCK_TYPES)
                if blocks is not None:
                    np.testing.assert_array_equal(blocks.dequantize(), expected)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks_are_exact_for_any_bytes(tmp_path: Path, kind: Type) -> None:
    raw = _random_blocks(kind, rows=8, blocks=4)
    tensor = _single_tensor(tmp_path, raw, kind)
    blocks = tensor.blocks()
    assert blocks is not None
    width = 4 * 32
    assert blocks.bits == (8 if kind == Type.Q8_0 else 4)
    assert blocks.codes.shape == (8, width) and blocks.scales.shape == (8, 4)
    assert blocks.codes.dtype == (np.uint8 if kind == Type.Q4_1 else np.int8)
    assert (blocks.offsets is None) == (kind != Type.Q4_1)
    np.testing.assert_array_equal(blocks.dequantize(), tensor.load())
    np.testing.assert_array_equal(tensor.load(), dequantize(raw, kind))


@pytest.mark.parametrize("kind", sorted([*_type_traits, Type.F32, Type.F16]), ids=lambda k: k.name)
def test_every_type_that_can_be_dequantized(tmp_path: Path, kind: Type) -> None:
    raw = _random_blocks(kind, rows=20, blocks=2)
    tensor = _single_tensor(tmp_path, raw, kind)
    assert tensor.dtype == kind.name
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(tensor.load(), dequantize(raw, kind))


@pytest.mark.parametrize("rows_a_chunk", [1, 3, 1000])
def test_reading_in_chunks_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_a_chunk: int
) -> None:
    path = write_gguf(tmp_path / "m.gguf", matrix_type=Type.Q8_0)
    with open_checkpoint(path) as checkpoint:
        whole = checkpoint.tensors[QUERY].load()
        monkeypatch.setattr(gguf_data, "_CHUNK_VALUES", rows_a_chunk * HIDDEN)
        np.testing.assert_array_equal(checkpoint.tensors[QUERY].load(), whole)


def test_k_quants_follow_their_definition(tmp_path: Path) -> None:
    for kind, value_of in ((Type.Q4_K, _q4_k_value), (Type.Q6_K, _q6_k_value)):
        raw = _random_blocks(kind, rows=2, blocks=1)
        loaded = _single_tensor(tmp_path, raw, kind).load()
        expected = [[value_of(block.tobytes(), i) for i in range(256)] for block in raw]
        np.testing.assert_allclose(loaded, expected, rtol=1e-6, atol=1e-6)


def test_loading_needs_little_more_than_the_tensor(tmp_path: Path) -> None:
    rows = 4096
    raw = quantize(np.zeros((rows, 1024), np.float32), Type.Q4_1)
    tensor = _single_tensor(tmp_path, raw, Type.Q4_1)
    tracemalloc.start()
    try:
        loaded = tensor.load()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert loaded.nbytes < peak < 2 * loaded.nbytes


def test_types_without_conversion_are_named(tmp_path: Path) -> None:
    tensor = _single_tensor(tmp_path, np.zeros((4, 4), np.int32), Type.I32)
    with pytest.raises(CheckpointError, match=r"'x\.weight' has type I32"):
        tensor.load()


def test_unknown_architecture_opens_with_its_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", architecture="mamba")
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config == {"architectures": ["mamba"], "model_type": "mamba"}
        assert "blk.0.attn_q.weight" in checkpoint.tensors


def test_missing_key_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama__embedding_length=None)
    with pytest.raises(CheckpointError, match=r"no metadata key 'llama\.embedding_length'"):
        open_checkpoint(path)


def test_key_of_another_type_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama__block_count="two")
    with pytest.raises(CheckpointError, match=r"'llama\.block_count' is 'two', not a whole"):
        open_checkpoint(path)


@pytest.mark.parametrize("value", [0, 2**31, [2, 3]])
def test_sizes_without_sense_are_refused(tmp_path: Path, value: object) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama__attention__head_count=value)
    with pytest.raises(CheckpointError, match="head_count"):
        open_checkpoint(path)


def test_a_value_repeated_for_every_layer_is_one_value(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama__attention__head_count=[HEADS] * LAYERS)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config["num_attention_heads"] == HEADS


def test_missing_tensor_and_config_key_are_named(tmp_path: Path) -> None:
    tensors = hf_tensors()
    del tensors[QUERY]
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors=tensors)) as checkpoint:
        assert QUERY not in checkpoint.tensors
        with pytest.raises(CheckpointError, match=QUERY):
            checkpoint.tensors[QUERY]
        with pytest.raises(CheckpointError, match="no 'sliding_window'"):
            checkpoint.config["sliding_window"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"llama__expert_count": 8}, "mixture of experts"),
        ({"llama__attention__value_length": HEAD_DIM // 2}, "uneven heads"),
        ({"split__count": 3}, "part of 3"),
    ],
)  # fmt: skip
def test_variants_are_refused(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", **changes))


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    extra = ("blk.0.ssm_a.weight", np.zeros((4, 4), np.float32), Type.F32)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ssm_a\.weight"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", raw=[extra]))


def test_rope_scaling(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "linear.gguf",
        llama__rope__scaling__type="linear",
        llama__rope__scaling__factor=4.0,
        llama__rope__scaling__original_context_length=128,
    )
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config["rope_scaling"] == {
            "rope_type": "linear",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    factors = np.arange(1, HEAD_DIM // 2 + 1, dtype=np.float32)
    path = write_gguf(tmp_path / "f.gguf", raw=[("rope_freqs.weight", factors, Type.F32)])
    with open_checkpoint(path) as checkpoint:
        scaling = checkpoint.config["rope_scaling"]
        assert scaling == {"rope_type": "frequency_factors", "factors": factors.tolist()}
        assert "rope_freqs.weight" not in checkpoint.tensors


def test_closed_checkpoint_cannot_load(tmp_path: Path) -> None:
    with open_checkpoint(write_gguf(tmp_path / "m.gguf")) as checkpoint:
        tensor = checkpoint.tensors[QUERY]
    with pytest.raises(CheckpointError, match="closed"):
        tensor.load()


def test_file_cut_after_opening(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    with open_checkpoint(path) as checkpoint:
        with path.open("r+b") as stream:
            stream.truncate(5000)
        with pytest.raises(CheckpointError, match="truncated"):
            for tensor in checkpoint.tensors.values():
                tensor.load()


@pytest.mark.model
def test_real_checkpoint() -> None:
    path = require_checkpoint()
    stored = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.sha256() == (
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
        )
        assert len(checkpoint.tensors) == len(stored) == 272
        _check_rows(checkpoint, "self_attn.q_proj", stored["blk.3.attn_q.weight"], heads=9)
        _check_rows(checkpoint, "self_attn.k_proj", stored["blk.3.attn_k.weight"], heads=3)
        _check_rows(checkpoint, "mlp.down_proj", stored["blk.3.ffn_down.weight"], heads=None)
        assert checkpoint.tensors["model.embed_tokens.weight"].shape == (49152, 576)


def _check_rows(checkpoint: Checkpoint, module: str, stored: Any, heads: int | None) -> None:
    """Undo the row order the way the inverse of the converter's reshape does."""
    expected = dequantize(stored.data, stored.tensor_type)
    if heads is not None:
        rows, width = expected.shape
        expected = expected.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2)
        expected = expected.reshape(rows, width)
    loaded = checkpoint.tensors[f"model.layers.3.{module}.weight"].load()
    np.testing.assert_array_equal(loaded, expected)


def _single_tensor(folder: Path, raw: NDArray[Any], kind: Type) -> LazyTensor:
    """A tensor of a file of unknown architecture, which renames and reorders nothing."""
    path = write_gguf(
        folder / f"{kind.name}.gguf", tensors={}, raw=[("x.weight", raw, kind)], architecture="x"
    )
    return open_checkpoint(path).tensors["x.weight"]


def _random_blocks(kind: Type, rows: int, blocks: int) -> Bytes:
    """Any bytes are valid codes, but float16 scales must be finite for an exact comparison."""
    rng = np.random.default_rng(int(kind))
    raw = rng.integers(0, 256, (rows, blocks * GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    return raw & np.uint8(0xBB)  # clears an exponent bit of every float16 and bfloat16


def _half(block: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", block, at)[0])


def _q4_k_value(block: bytes, i: int) -> float:
    """float16 d, float16 dmin, 12 bytes of eight 6-bit scales and minima, 128 bytes of codes."""
    sub, scales = i // 32, block[4:16]
    if sub < 4:
        scale, minimum = scales[sub] & 63, scales[sub + 4] & 63
    else:
        scale = (scales[sub + 4] & 15) | (scales[sub - 4] >> 6) << 4
        minimum = (scales[sub + 4] >> 4) | (scales[sub] >> 6) << 4
    byte = block[16 + i // 64 * 32 + i % 32]
    code = byte >> 4 if sub % 2 else byte & 15
    return _half(block, 0) * scale * code - _half(block, 2) * minimum


def _q6_k_value(block: bytes, i: int) -> float:
    """128 bytes low nibbles, 64 bytes high bit pairs, 16 int8 scales, float16 d."""
    half, quarter, at = i // 128, i % 128 // 32, i % 32
    byte = block[half * 64 + quarter % 2 * 32 + at]
    low = byte >> 4 if quarter >= 2 else byte & 15
    high = block[128 + half * 32 + at] >> (2 * quarter) & 3
    scale = int(struct.unpack_from("b", block, 192 + i // 16)[0])
    return _half(block, 208) * scale * ((low | high << 4) - 32)
