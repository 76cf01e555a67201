"""A processor with AVX2 and no AVX-512, emulated: what is found on it, and that INT8 is right.

qemu-user emulates AVX2 since 7.2 and knows no AVX-512. A program that an emulated one starts runs
on the real processor, so probes are pointed at an interpreter that is itself emulated. What
/proc/cpuinfo says stays the real processor's, which is just the case that probes are for: flags
that cannot be believed.

Without VNNI, onnxruntime multiplies u8 by s8 with vpmaddubsw, whose 16-bit sums of two products
saturate: 255 * 127 * 2 = 64,770 is twice what they hold. `session.x64quantprecision=1` makes it
change the weights to u8, for which it has a kernel that does not saturate. Seen with onnxruntime
1.32: logits of a small model are off by up to 6.4 without the option and by 5e-6 with it.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from headrace.backends.cpu_avx512.threads import choose_kernels
from headrace.exporters.graph.builder import GraphBuilder, graph_input, named_output
from headrace.exporters.graph.functions import row_quant_matmul
from headrace.exporters.graph.weights import WeightStore
from headrace.runtime.machine.hardware import probe_hardware

QEMU = shutil.which("qemu-x86_64")
CPU = "Haswell"
TESTS = Path(__file__).resolve().parent.parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or platform.machine() != "x86_64",
        reason="qemu-user runs programs of this Python's architecture on Linux only",
    ),
    pytest.mark.skipif(QEMU is None, reason="qemu-x86_64 is not installed (Debian: qemu-user)"),
]

RunEmulated = Callable[..., Any]


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This Python on the emulated processor."""
    assert QEMU is not None
    told = subprocess.run([QEMU, "--version"], capture_output=True, encoding="utf-8").stdout
    version = re.search(r"version ([0-9]+)\.([0-9]+)", told)
    if version is None or tuple(map(int, version.groups())) < (7, 2):
        pytest.skip(f"this qemu does not emulate AVX2: {told.splitlines()[0]}")
    program = tmp_path_factory.mktemp("emulated") / "python-avx2"
    program.write_text(f'#!/bin/sh\nexec "{QEMU}" -cpu {CPU} "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    return program


@pytest.fixture(scope="module")
def run_emulated(interpreter: Path) -> RunEmulated:
    """`run(code, *words)`: execute `code` with sys.argv[1:] = words; the JSON that it prints."""

    def run(code: str, *words: object) -> Any:
        command = [interpreter, "-c", code, *map(str, words)]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


DETECT = """
import json, sys
from pathlib import Path
sys.executable, root = sys.argv[1], Path(sys.argv[2])
from headrace.backends.cpu_avx512.threads import choose_kernels
from headrace.runtime.machine.hardware import probe_hardware
found = probe_hardware(root)
kernels = choose_kernels(found)
print(json.dumps({
    "probes": {p.feature: p.works for p in found.probes}, "features": sorted(found.features),
    "kernels": kernels.name, "options": dict(kernels.session_options), "said": kernels.warning,
}))
"""


def test_flags_that_do_not_work_are_not_believed(
    run_emulated: RunEmulated, interpreter: Path, tmp_path: Path
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(
        "model name : pretends\nflags : sse2 avx2 avx512f avx_vnni avx512_vnni amx_int8 amx_bf16\n"
    )
    found = run_emulated(DETECT, interpreter, tmp_path)
    refused = ["avx512f", "avx_vnni", "avx512_vnni", "amx_int8", "amx_bf16"]
    assert found["probes"] == {"avx2": True, **dict.fromkeys(refused, False)}
    assert found["features"] == ["avx2", "sse2"]
    assert found["kernels"] == "avx2"
    assert found["options"] == {"session.x64quantprecision": "1"}
    assert "no VNNI" in found["said"]


MULTIPLY = """
import json, sys
import numpy as np
import onnxruntime as ort
folder, precise = sys.argv[1:]
options = ort.SessionOptions()
options.intra_op_num_threads = 1
if precise == "1":
    options.add_session_config_entry("session.x64quantprecision", "1")
session = ort.InferenceSession(folder + "/graph.onnx", options, ["CPUExecutionProvider"])
x = np.load(folder + "/x.npy")
y = session.run(None, {"x": x, "middle": np.full((len(x), 1), 128, np.uint8)})[0]
print(json.dumps(y.tolist()))
"""


def test_row_int8_needs_the_precise_kernels(run_emulated: RunEmulated, tmp_path: Path) -> None:
    """Full-range rows and weights: right with the option, wrong by a large part without."""
    rng = np.random.default_rng(0)
    x = rng.choice([-1, 1], (4, 64)).astype(np.float32) * rng.uniform(0.8, 1, (4, 64))
    x = x.astype(np.float32)
    codes = (rng.choice([-1, 1], (64, 32)) * rng.integers(100, 128, (64, 32))).astype(np.int8)
    scales = rng.uniform(1e-3, 1e-2, 32).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    write_row_int8_graph(tmp_path, codes, scales)

    expected = row_int8_product(x, codes, scales)
    largest = np.abs(expected).max()
    precise = np.array(run_emulated(MULTIPLY, tmp_path, 1))
    assert np.abs(precise - expected).max() < 1e-6 * largest
    default = np.array(run_emulated(MULTIPLY, tmp_path, 0))
    assert np.abs(default - expected).max() > 0.1 * largest, (
        "onnxruntime does not saturate any more: the option is not needed"
    )


def test_weights_of_reduced_range_need_no_option(run_emulated: RunEmulated, tmp_path: Path) -> None:
    """The largest sums there can be: all codes of a row at their ends."""
    signs = np.random.default_rng(0).choice([-1, 1], (4, 64))
    signs[0] = 1
    x = signs.astype(np.float32)
    codes = np.full((64, 32), 63, np.int8) * np.where(np.arange(32) % 2, 1, -1).astype(np.int8)
    scales = np.full(32, 1e-2, np.float32)
    np.save(tmp_path / "x.npy", x)
    write_row_int8_graph(tmp_path, codes, scales)
    expected = row_int8_product(x, codes, scales)
    product = np.array(run_emulated(MULTIPLY, tmp_path, 0))
    assert np.abs(product - expected).max() < 1e-6 * np.abs(expected).max()


def write_row_int8_graph(folder: Path, codes: np.ndarray, scales: np.ndarray) -> None:
    """The function that packages use, as an exported graph calls it."""
    inputs, outputs = codes.shape
    with WeightStore(folder, "weights.bin") as store:
        g = GraphBuilder(store)
        x = graph_input("x", ir.DataType.FLOAT, ["N", inputs])
        middle = graph_input("middle", ir.DataType.UINT8, ["N", 1])
        weights = g.constant("codes", codes), g.constant("scales", scales)
        product = g.call(row_quant_matmul(), x, *weights, middle)
        y = named_output(product, "y", ir.DataType.FLOAT, ["N", outputs])
        ir.save(g.model([x, middle], [y], "row_int8"), folder / "graph.onnx")


def row_int8_product(x: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    step = np.abs(x).max(axis=1, keepdims=True) * np.float32(1 / 127)
    q = np.rint(x / step).astype(np.int32)
    return np.asarray((q @ codes.astype(np.int32)) * scales.astype(np.float64) * step)


DECODE = """
import json, logging, sys
from pathlib import Path
executable, tests, package = sys.argv[1:]
sys.executable = executable or sys.executable
sys.path.insert(0, tests)
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("headrace").addHandler(handler)
from backend_driver import run_schedule
tokens = list(range(3, 23))
logits, _ = run_schedule(Path(package), [tokens, tokens[::-1]], [
    [(0, 0, 15)], [(0, 15, 16), (1, 0, 12)], [(0, 16, 20), (1, 12, 20)],
])
print(json.dumps({"logits": [rows.tolist() for rows in logits], "said": said}))
"""


def test_a_package_decodes_alike(
    run_emulated: RunEmulated, interpreter: Path, tiny_package: Callable[..., Path]
) -> None:
    """The logits of the real processor, up to float32 rounding that may move a code by one."""
    package = tiny_package("w8a8_row", "int8")
    command = [sys.executable, "-c", DECODE, "", TESTS, package]
    native = subprocess.run(command, capture_output=True, check=True, timeout=300)
    expected = np.array(json.loads(native.stdout.splitlines()[-1])["logits"])

    def mean_error(answer: Any) -> float:
        return float(np.abs(np.array(answer["logits"]) - expected).mean())

    found = run_emulated(DECODE, interpreter, TESTS, package)
    assert mean_error(found) < 0.003 * expected.std()
    assert sum("no VNNI" in text for text in found["said"]) == 1

    # Probes that run on a real processor with VNNI mislead the emulated one: this test can fail.
    if choose_kernels(probe_hardware()).name in ("vnni", "amx"):
        misled = run_emulated(DECODE, sys.executable, TESTS, package)
        assert misled["said"] == []
        assert mean_error(misled) > 0.03 * expected.std()
