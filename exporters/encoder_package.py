"""Write an encoder package: graph, weights, tokenizer, manifest."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

import onnx_ir as ir
from tokenizers import Tokenizer

from headrace.exporters.archs.bert import encoder_spec, is_encoder
from headrace.exporters.archs.encoder_spec import EncoderSpec
from headrace.exporters.archs.encoder_tensors import check_encoder_tensors, encoder_weight_names
from headrace.exporters.atomic_folder import atomic_folder
from headrace.exporters.checkpoint.sentence_transformers import sentence_settings
from headrace.exporters.checkpoint.source import Checkpoint, open_checkpoint
from headrace.exporters.checkpoint.tokenizer_encoder import (
    encoder_golden_texts,
    encoder_tokenizer,
    tokenizer_limit,
)
from headrace.exporters.encoder_runner import CosineFidelity, compare_vectors, encode_plainly
from headrace.exporters.graph.encoder import EncoderParts, build_encoder
from headrace.exporters.graph.linear import Float32, LinearFormat
from headrace.exporters.graph.mixed import MixedFormat
from headrace.exporters.graph.weights import WeightStore
from headrace.exporters.measured import FormatPlan
from headrace.exporters.options import ExportOptions
from headrace.exporters.package import Progress, list_files
from headrace.exporters.precision import check_rules, find_precision
from headrace.exporters.weight_source import WeightSource
from headrace.runtime.encoder.manifest import (
    EncoderInfo,
    EncoderManifest,
    EncoderTargetInfo,
    EncoderTokenizerInfo,
    PoolingInfo,
)
from headrace.runtime.errors import ConfigError, ExportError
from headrace.runtime.manifest import (
    ENCODER_KIND,
    MANIFEST_FILE,
    SCHEMA_VERSION,
    SourceInfo,
    TensorInfo,
)

# Of a package against its FP32 graph, mean over texts; below it the package is not written.
COSINE_GATE = 0.99
_DECODERS_OWN = (
    "kv_cache",
    "forms",
    "quant_threshold",
    "calibration_text",
    "qat_text",
    "stages",
    "tensor_parallel",
    "targets",
)
_PRECISIONS = ("w8a8_row", "w7a8_row", "w8a8_block", "w4a8_block", "fp32")
_WEIGHTS_FILE = "weights.bin"
_GRAPH_FILE = "encoder.onnx"
_MIN_ONNXRUNTIME = "1.31"
_NUM_TEXTS = 32
_DEFAULT_MAX_TOKENS = 512


@dataclasses.dataclass(frozen=True, slots=True)
class EncoderExport:
    """What was written; `fidelity` is None for an fp32 package and where nothing was measured."""

    manifest: EncoderManifest
    fidelity: CosineFidelity | None


def is_encoder_source(source: Path) -> bool:
    """Whether a checkpoint is a text encoder, by its configuration.

    Raises:
        CheckpointError: it cannot be opened.
    """
    with open_checkpoint(source) as checkpoint:
        return is_encoder(checkpoint.config)


def export_encoder(
    source: Path,
    output: Path,
    *,
    options: ExportOptions | None = None,
    progress: Progress | None = None,
    **changes: Any,
) -> EncoderExport:
    """Turn a text encoder into a package.

    Args:
        source: a Hugging Face folder with config.json, tokenizer.json and safetensors or ONNX.
        output: the package folder to make.
        options: `precision`, `rules`, `force`, `calibrate` (False: measure nothing) and
            `overwrite`; the others are about decoders.
        changes: fields of `ExportOptions`, over those of `options`.

    Raises:
        ConfigError: an option is unknown or about decoders.
        CheckpointError: the source cannot be used.
        ExportError: the package cannot be written, its graph does not run, or it is further from
            the FP32 model than `COSINE_GATE`.
    """
    chosen = dataclasses.replace(options or ExportOptions(), **changes)
    _check_options(chosen)
    report = progress or (lambda stage, done, total: None)
    with open_checkpoint(source) as checkpoint:
        spec = encoder_spec(checkpoint.config, checkpoint.tensors)
        check_encoder_tensors(spec, checkpoint.tensors)
        check_rules(chosen.rules, encoder_weight_names(spec))
        with atomic_folder(output, overwrite=chosen.overwrite, keep=source) as folder:
            return _Export(checkpoint, spec, folder, chosen, report).run()


def _check_options(options: ExportOptions) -> None:
    options.check()
    if options.precision not in _PRECISIONS:
        expected = f"one of {', '.join(_PRECISIONS)} for an encoder"
        raise ConfigError("precision", options.precision, expected)
    usual = ExportOptions()
    for name in _DECODERS_OWN:
        if (value := getattr(options, name)) != getattr(usual, name):
            raise ConfigError(
                name, value, "nothing: this source is an encoder, it has no use for it"
            )


class _Export:
    """One export under way."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: EncoderSpec,
        folder: Path,
        options: ExportOptions,
        progress: Progress,
    ) -> None:
        self.checkpoint, self.spec, self.folder = checkpoint, spec, folder
        self.options, self.progress = options, progress
        self.precision = find_precision(options.precision)
        home = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
        self.tokenizer = encoder_tokenizer(home, spec.vocab_size)
        settings = sentence_settings(home)
        self.pooling = PoolingInfo(
            mode=settings.pooling, normalize=settings.normalize, stated=settings.stated
        )
        limits = (settings.max_tokens or tokenizer_limit(home), spec.max_tokens)
        self.max_tokens = min(limit for limit in limits if limit is not None)
        self.source = WeightSource(checkpoint.tensors)
        self.plan = FormatPlan(self.precision, frozenset(), tuple(options.rules))

    def run(self) -> EncoderExport:
        target = self._write_target(self.folder / self.precision.target, self._format())
        fidelity = self._measure(self.folder / target.file)
        tokenizer = EncoderTokenizerInfo(
            file="tokenizer.json", golden=encoder_golden_texts(self.tokenizer)
        )
        (self.folder / tokenizer.file).write_text(self.tokenizer.to_str(), encoding="utf-8")
        self._write_report(target, fidelity)
        manifest = EncoderManifest(
            schema_version=SCHEMA_VERSION,
            kind=ENCODER_KIND,
            generator="headrace",
            model=self._model_info(),
            pooling=self.pooling,
            source=SourceInfo(
                format=self.checkpoint.format,
                file=self.checkpoint.path.name,
                sha256=self.checkpoint.sha256(),
            ),
            tokenizer=tokenizer,
            targets=(target,),
            files=list_files(self.folder, self.progress),
        )
        (self.folder / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
        return EncoderExport(manifest, fidelity)

    def _format(self) -> MixedFormat:
        """Formats as planned, with the inputs of some products mixed where those are row INT8.

        What a LayerNorm gives has outliers, which mixing spreads. MiniLM-L6, cosine to FP32 over 32
        texts, mean and least: nothing mixed 0.9968, 0.990; into attention 0.9985, 0.995; into the
        MLP too 0.9990, 0.997; its second product too 0.9996, 0.999, which costs as much again.
        """
        fmt, names = self.plan.make(), self.spec.layer
        for layer in range(self.spec.num_layers):
            fmt.mix_inputs_of(
                "+".join(n.format(layer) for n in (names.query, names.key, names.value))
            )
            fmt.mix_inputs_of(names.inner.format(layer))
        return fmt

    def _write_target(self, folder: Path, fmt: LinearFormat) -> EncoderTargetInfo:
        folder.mkdir()
        parts = EncoderParts(
            spec=self.spec,
            weight=self.source.weight,
            vector=self.source.vector,
            format=fmt,
            first_token_only=self.pooling.mode == "cls",
        )
        layers = self.spec.num_layers
        with WeightStore(folder, _WEIGHTS_FILE) as store:
            model = build_encoder(
                parts, store, lambda done: self.progress("writing layers", done, layers)
            )
            ir.save(model, folder / _GRAPH_FILE)
            described, size = store.described(), store.size_bytes
        return EncoderTargetInfo(
            name=folder.name,
            device="cpu",
            precision=self.precision.name,
            file=f"{folder.name}/{_GRAPH_FILE}",
            min_onnxruntime=_MIN_ONNXRUNTIME,
            tensors=tuple(
                TensorInfo(name=name, format=kind, shape=shape, bytes=nbytes)
                for name, kind, shape, nbytes in described
            ),
            weight_bytes=size,
        )

    def _measure(self, graph: Path) -> CosineFidelity | None:
        """Run the graph, and compare it with the FP32 one where it is another."""
        texts = measuring_texts(self.tokenizer, self.max_tokens)
        self.progress("measuring the package", 0, 1)
        exact = self.precision.name == "fp32" and not self.options.rules
        if exact or not self.options.calibrate:
            encode_plainly(graph, texts[:1], self.pooling)
            fidelity = None
        else:
            with tempfile.TemporaryDirectory(prefix="measure-", dir=self.folder) as scratch:
                reference = self._write_target(Path(scratch) / "fp32", Float32())
                expected = encode_plainly(Path(scratch) / reference.file, texts, self.pooling)
            fidelity = compare_vectors(expected, encode_plainly(graph, texts, self.pooling))
        self.progress("measuring the package", 1, 1)
        if fidelity is None or fidelity.mean_cosine >= COSINE_GATE or self.options.force:
            return fidelity
        raise ExportError(
            f"precision {self.precision.name} gives vectors with a mean cosine of "
            f"{fidelity.mean_cosine:.4f} to the FP32 model, below {COSINE_GATE}; choose "
            "--precision fp32, keep the worst tensors with --rule, or --force"
        )

    def _write_report(self, target: EncoderTargetInfo, fidelity: CosineFidelity | None) -> None:
        report = {
            "precision": target.precision,
            "cosine_gate": COSINE_GATE,
            "joint": None if fidelity is None else dataclasses.asdict(fidelity),
            "weight_bytes": target.weight_bytes,
            "tensors": [dataclasses.asdict(tensor) for tensor in target.tensors],
        }
        text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
        (self.folder / "precision_report.json").write_text(text, encoding="utf-8")

    def _model_info(self) -> EncoderInfo:
        spec = self.spec
        return EncoderInfo(
            architecture=spec.architecture,
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_layers=spec.num_layers,
            num_heads=spec.num_heads,
            max_tokens=self.max_tokens,
        )


def measuring_texts(tokenizer: Tokenizer, max_tokens: int) -> list[list[int]]:
    """Token ids of prose in pieces of mixed lengths, from 2 to 128 words."""
    prose = resources.files("headrace.exporters") / "data" / "calibration_wikitext.txt"
    words = prose.read_text(encoding="utf-8").split()
    texts, start = [], 0
    for i in range(_NUM_TEXTS):
        count = 2 ** (1 + i % 7)
        piece = " ".join(words[start : start + count])
        start += count
        texts.append(list(tokenizer.encode(piece).ids)[:max_tokens])
    return texts
