"""CUDA graphs, executed by the reference evaluator, against the CPU's FP32 graphs.

FP16 rounds each value by up to 2^-11 of it. On the way to a logit that happens some 40 times, in
random directions, and random weights amplify it: sqrt(40) * 2^-11 = 0.003 of the logits' own size
is to be expected. Over all models 0.0011 to 0.0037 were measured, and 3e-5 nats at most. A mistake
is far outside: a window that is one token off moves logits by 0.15 and more.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from architectures import CONFIGS, write_model
from backend_driver import ragged_schedule, run_schedule
from cuda_reference import Reference
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel
from paged_runner import Float, Schedule, run_paged

from headrace.exporters.cuda_target import CUDA_TARGETS
from headrace.exporters.package import export_package
from headrace.runtime.errors import ConfigError, ExportError
from headrace.runtime.fidelity import log_softmax, mean_kl_nats
from headrace.runtime.manifest import Manifest, read_manifest

LENGTHS = (1, 30, 22, 9)
FP16_TOLERANCE = 0.006
FP16_NATS = 1e-4
ENTROPY_TOLERANCE = 0.05  # nats
SCHEDULES: dict[str, Schedule] = {
    "prefill": [[(i, 0, n) for i, n in enumerate(LENGTHS)]],
    "decode": [
        [(i, t, t + 1) for i, n in enumerate(LENGTHS) if t < n] for t in range(max(LENGTHS))
    ],
    "ragged": ragged_schedule(LENGTHS, np.random.default_rng(2)),
}
LONGROPE = [name for name, config in CONFIGS.items() if "longrope" in str(config)]
MODELS = ["llama", *(name for name in CONFIGS if name not in LONGROPE)]
Exported = tuple[Path, Manifest]


def sequences() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(3, 250, length).tolist() for length in LENGTHS]


def rms_error(actual: Float, expected: Float) -> float:
    """Root mean square of the difference, in units of that of the expected values."""
    return float(np.sqrt(np.square(actual - expected).mean() / np.square(expected).mean()))


def export(source: Path, folder: Path, *targets: str) -> Exported:
    export_package(source, folder, precision="fp32", kv_cache="fp32", targets=("cpu", *targets))
    return folder, read_manifest(folder, verify_hashes=True)


@pytest.fixture(scope="module", params=MODELS)
def fp16(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_checkpoint: Callable[..., Path],
) -> Exported:
    folder = tmp_path_factory.mktemp("cuda")
    if request.param == "llama":
        source = tiny_checkpoint(bias=True, tied=False)
    else:
        source = write_model(request.param, folder / "hf")
    return export(source, folder / "package", "cuda_fp16")


@pytest.fixture(scope="module")
def llama(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> Exported:
    """With all targets."""
    folder = tmp_path_factory.mktemp("cuda") / "package"
    return export(tiny_checkpoint(layers=2), folder, *CUDA_TARGETS)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_fp16_agrees_with_the_cpu(fp16: Exported, kind: str) -> None:
    package, manifest = fp16
    schedule = SCHEDULES[kind]
    expected, nats = run_schedule(package, sequences(), schedule)
    logits, entropy = run_paged(package, manifest, sequences(), schedule, target="cuda_fp16")
    a, b = np.concatenate(logits), np.concatenate(expected)
    assert 0 < rms_error(a, b) < FP16_TOLERANCE
    assert mean_kl_nats(log_softmax(b), log_softmax(a)) < FP16_NATS
    np.testing.assert_allclose(
        np.concatenate(entropy), np.concatenate(nats), atol=ENTROPY_TOLERANCE
    )


@pytest.mark.parametrize("target", CUDA_TARGETS)
def test_every_target_agrees_with_its_weights_in_float32(
    target: str, llama: Exported, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    package, manifest = llama
    logits, _ = run_paged(package, manifest, sequences(), SCHEDULES["ragged"], target=target)
    reference = Reference(tiny_checkpoint(layers=2), target, tmp_path / "reference", 64)
    expected = [reference.logits(text) for text in sequences()]
    assert 0 < rms_error(np.concatenate(logits), np.concatenate(expected)) < FP16_TOLERANCE


def test_blocks_do_not_change_the_answer(llama: Exported) -> None:
    package, manifest = llama
    small, large = (
        run_paged(
            package, manifest, sequences(), SCHEDULES["ragged"], target="cuda_fp16", block_tokens=n
        )[0]
        for n in (1, 64)
    )
    for a, b in zip(small, large, strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_the_manifest_says(llama: Exported) -> None:
    package, manifest = llama
    cpu, *cuda = manifest.targets
    assert (cpu.name, cpu.device, cpu.kv_cache.block_tokens) == ("cpu_fp32", "cpu", None)
    assert [(t.name, t.device) for t in cuda] == [(name, "cuda") for name in CUDA_TARGETS]
    for target in cuda:
        (graph,) = target.graphs
        assert (graph.form, graph.file) == ("paged", f"{target.name}/paged.onnx")
        assert graph.inputs == (
            "input_ids",
            "cumulative_seqlens",
            "cached_seqlens",
            "block_table",
            "slot_mapping",
            "attention_metadata",
            "logits_index",
        )
        assert graph.outputs == ("logits", "entropy", "argmax")
        # 2 layers of 2 heads of 16 channels, keys and values, two bytes each.
        assert target.kv_cache.bytes_per_token == 2 * 2 * 2 * 16 * 2
        assert (target.kv_cache.dtype, target.kv_cache.block_tokens) == ("float16", 256)
        assert (package / target.name / "weights.bin").stat().st_size == target.weight_bytes
    sizes = [target.weight_bytes for target in cuda]
    assert cpu.weight_bytes > sizes[0] > sizes[1] > sizes[2]
    assert {t.format for t in cuda[0].tensors} == {"fp16", "fp32"}
    norms = [t for t in cuda[0].tensors if "norm" in t.name]
    assert norms and {t.format for t in norms} == {"fp32"}


@pytest.mark.parametrize("target", CUDA_TARGETS)
def test_graph_passes_the_onnx_checker_where_it_knows_the_operators(
    llama: Exported, target: str
) -> None:
    onnx.checker.check_model(str(llama[0] / target / "paged.onnx"))


def test_onnxruntime_knows_every_operator_and_type(fp16: Exported) -> None:
    """It checks the whole graph before it looks for kernels, of which PagedAttention has none here.

    The CPU has no RMSNormalization of halves with a float32 gain either, and would put ONNX's
    decomposition in its place, which does not allow for that; the older operator is the same.
    """
    path = fp16[0] / "cuda_fp16" / "paged.onnx"
    model = onnx.load(str(path), load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "RMSNormalization":
            node.op_type = "SimplifiedLayerNormalization"
    onnx.save(model, str(path.with_name("checked.onnx")))
    options = ort.SessionOptions()
    options.log_severity_level = 4
    missing = "Could not find an implementation for PagedAttention"
    with pytest.raises(NoKernel, match=missing):
        ort.InferenceSession(
            str(path.with_name("checked.onnx")), options, providers=["CPUExecutionProvider"]
        )


def test_layers_work_in_halves_and_norms_in_float32(llama: Exported) -> None:
    model = onnx.load(str(llama[0] / "cuda_fp16" / "paged.onnx"), load_external_data=False)
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    for node in model.graph.node:
        stored = {types[name] for name in node.input if name in types}
        if node.op_type in ("MatMul", "PagedAttention"):
            assert stored == {onnx.TensorProto.FLOAT16}, node.name
        elif node.op_type == "RMSNormalization":
            assert stored == {onnx.TensorProto.FLOAT}, node.name
        assert node.op_type not in ("If", "Loop"), "CUDA graphs cannot hold control flow"


def test_cuda_alone(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    result = export_package(tiny_checkpoint(), tmp_path / "p", targets=("cuda_w8",))
    assert [target.name for target in result.manifest.targets] == ["cuda_w8"]
    assert result.fidelity is result.kv_fidelity is None
    read_manifest(tmp_path / "p", verify_hashes=True)


@pytest.mark.parametrize("name", LONGROPE)
def test_longrope_is_refused(name: str, tmp_path: Path) -> None:
    source = write_model(name, tmp_path / "hf")
    with pytest.raises(ExportError, match="longrope"):
        export_package(source, tmp_path / "p", targets=("cuda_fp16",))
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"targets": ()},
        {"targets": ("cuda",)},
        {"targets": ("cpu", "cpu")},
        {"targets": ("cuda_w4",), "quant_threshold": 0.01},
    ],
)
def test_targets_that_make_no_sense(options: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="target"):
        export_package(tmp_path, tmp_path / "p", **options)
