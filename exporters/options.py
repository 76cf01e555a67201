"""What an export is asked to do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from headrace.exporters.cuda_target import CUDA_TARGETS
from headrace.exporters.graph.decoder import FORMS
from headrace.exporters.precision import DEFAULT_PRECISION, PRECISIONS, Rule, find_precision
from headrace.runtime.errors import ConfigError

CPU_TARGET = "cpu"
TARGETS = (CPU_TARGET, *CUDA_TARGETS)
DEFAULT_FORMS = ("ragged", "uniform")
KV_CACHES = ("auto", "int8", "int4", "fp32")
DEFAULT_THRESHOLD_NATS = 0.01  # of `auto`
DEFAULT_QAT_STEPS = 200
# By the names of the engine's presets; the others take packages as they are.
PRESETS = {"low-memory": {"precision": "int4", "kv_cache": "int8"}}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """How to export.

    Attributes:
        targets: of `TARGETS`, each once. All options but `overwrite` are about the CPU.
        precision: a name of `precision.PRECISIONS`.
        kv_cache: "int8", "int4", "fp32", or "auto": INT8 if it adds at most `KV_GATE_NATS`, and
            fp32 for an fp32 package. What a quantized cache adds is measured and reported.
        forms: of `graph.decoder.FORMS`.
        rules: pins of weights to formats; the first that matches a weight wins.
        quant_threshold: mean KL in nats against the FP32 model that the finished package may have
            on text that was not calibrated on; None: `DEFAULT_THRESHOLD_NATS` for `auto`, no
            limit for others.
        stages: the CPU's graphs are also written in so many parts, each of some layers.
        force: write a package that is over the threshold.
        calibrate: False: round to nearest and measure nothing; the cache is float32.
        calibration_text: in place of the prose that comes with headrace.
        overwrite: replace an existing package.
        qat_text: train the weights in their formats on this text (`qat.py`); None: do not.
        qat_steps: how long.
        tensor_parallel: processes that every target is split between; of `forms` they get the
            first. Calibration and formats are those of the whole model.
    """

    targets: Sequence[str] = (CPU_TARGET,)
    precision: str = DEFAULT_PRECISION
    kv_cache: str = "auto"
    forms: Sequence[str] = DEFAULT_FORMS
    rules: Sequence[Rule] = ()
    quant_threshold: float | None = None
    stages: int = 1
    force: bool = False
    calibrate: bool = True
    calibration_text: str | None = None
    overwrite: bool = False
    qat_text: str | None = None
    qat_steps: int = DEFAULT_QAT_STEPS
    tensor_parallel: int | None = None

    def check(self) -> None:
        """Raises ConfigError: an option is unknown, or two of them exclude each other."""
        chosen = find_precision(self.precision)
        wrong = [name for name in self.targets if name not in TARGETS]
        if not self.targets or wrong or len(set(self.targets)) < len(self.targets):
            raise ConfigError(
                "target", ",".join(self.targets), f"one or more of {', '.join(TARGETS)}, each once"
            )
        if self.kv_cache not in KV_CACHES:
            raise ConfigError("kv_cache", self.kv_cache, f"one of {', '.join(KV_CACHES)}")
        unknown = [form for form in self.forms if form not in FORMS]
        if not self.forms or unknown:
            raise ConfigError("form", unknown and unknown[0], f"one or more of {', '.join(FORMS)}")
        threshold = self.quant_threshold
        if threshold is not None and not 0 < threshold < math.inf:
            raise ConfigError("quant_threshold", threshold, "a number of nats above 0")
        if self.stages < 1:
            raise ConfigError("stages", self.stages, "a number of stages above 0")
        needs = {
            f"precision {self.precision}": bool(chosen.measured),
            f"kv_cache {self.kv_cache}": self.kv_cache in ("int8", "int4"),
            "quant_threshold": threshold is not None,
            "calibration_text": self.calibration_text is not None,
            "qat": self.qat_text is not None,
        }
        if not self.calibrate and (wanting := [name for name, wants in needs.items() if wants]):
            raise ConfigError("calibrate", False, f"calibration, which {wanting[0]} needs")
        needs |= {"stages": self.stages > 1, "rule": bool(self.rules)}
        wanting = [name for name, wants in needs.items() if wants]
        if wanting and CPU_TARGET not in self.targets:
            raise ConfigError(
                "target", ",".join(self.targets), f"{CPU_TARGET}, too, which {wanting[0]} is about"
            )
        if self.qat_text is not None:
            self._check_qat()
        elif self.qat_steps != DEFAULT_QAT_STEPS:
            raise ConfigError("qat_steps", self.qat_steps, "--qat beside it, the text to train on")
        self._check_ranks()

    def _check_ranks(self) -> None:
        if self.tensor_parallel is None:
            return
        if self.tensor_parallel < 2:
            raise ConfigError("tensor_parallel", self.tensor_parallel, "2 or more processes")
        if self.qat_text is not None:
            raise ConfigError("tensor_parallel", self.tensor_parallel, "nothing beside --qat")
        if self.stages > 1:
            raise ConfigError("stages", self.stages, "1 with --tensor-parallel")
        keeps = [rule.format for rule in self.rules if rule.format == "keep"]
        if keeps or self.precision == "keep":
            raise ConfigError(
                "tensor_parallel",
                self.tensor_parallel,
                "a precision that rounds: blocks of the checkpoint cannot be cut",
            )

    def _check_qat(self) -> None:
        if not find_precision(self.precision).can_be_trained:
            names = ", ".join(name for name, p in PRECISIONS.items() if p.can_be_trained)
            raise ConfigError(
                "precision",
                self.precision,
                f"with --qat one that rounds weights to 4 or 8 bits: {names}",
            )
        if any(rule.format == "keep" for rule in self.rules):
            raise ConfigError("rule", "keep", "with --qat no rule that keeps blocks as they are")
        if self.qat_steps < 1:
            raise ConfigError("qat_steps", self.qat_steps, "a number of steps above 0")

    @property
    def threshold_nats(self) -> float | None:
        if self.quant_threshold is None and self.precision == "auto":
            return DEFAULT_THRESHOLD_NATS
        return self.quant_threshold
