"""Write a package: graphs, weights, tokenizer, manifest.

Everything is written to a temporary folder beside the output and renamed when complete, so a
failure leaves nothing half-written and an existing package is replaced as a whole.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, Protocol

import onnx_ir as ir
from tokenizers import Tokenizer

from headrace.exporters.archs.spec import DecoderSpec
from headrace.exporters.archs.tensors import weight_names
from headrace.exporters.atomic_folder import atomic_folder
from headrace.exporters.calibrate import (
    KV_GATE_NATS,
    Calibration,
    CalibrationChunks,
    calibrate,
    calibration_chunks,
    compare_graphs,
    with_grams,
)
from headrace.exporters.checkpoint.golden import golden_texts
from headrace.exporters.checkpoint.source import Checkpoint, open_checkpoint
from headrace.exporters.cuda_target import (
    CUDA_TARGETS,
    cuda_parts,
    cuda_target_info,
    write_cuda_target,
)
from headrace.exporters.graph.attention import KvScales
from headrace.exporters.graph.decoder import PAGED, DecoderParts, build_decoder
from headrace.exporters.graph.weights import WeightStore
from headrace.exporters.measured import FormatPlan, Measurement
from headrace.exporters.model import checked_spec, decoder_parts
from headrace.exporters.options import CPU_TARGET, ExportOptions
from headrace.exporters.precision import check_rules, find_precision
from headrace.exporters.qat import Training, prepare_training
from headrace.exporters.rank_target import write_rank_target
from headrace.exporters.report import precision_report
from headrace.exporters.rotation import mixed_readers, rotation_report
from headrace.exporters.shards import split_spec
from headrace.exporters.stages import stage_layers
from headrace.exporters.target_info import WEIGHTS_FILE, graph_info, tensor_infos
from headrace.exporters.validate import check_graph
from headrace.runtime.errors import ConfigError, ExportError
from headrace.runtime.fidelity import Fidelity
from headrace.runtime.manifest import (
    MANIFEST_FILE,
    SCHEMA_VERSION,
    FileInfo,
    GraphInfo,
    KvCacheInfo,
    Manifest,
    ModelInfo,
    SourceInfo,
    TargetInfo,
    TokenizerInfo,
    file_sha256,
)

_MAX_REPAIRS = 6
_KV_DTYPES = {None: "float32", 8: "int8", 4: "int4"}


class Progress(Protocol):
    """Hears how an export gets on."""

    def __call__(self, stage: str, done: int, total: int) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class ExportResult:
    """What was written, and how far it is from the FP32 model.

    `kv_fidelity` is what a quantized cache alone costs, `fidelity` the whole package, each None
    where it was not measured.
    """

    manifest: Manifest
    kv_fidelity: Fidelity | None
    fidelity: Fidelity | None


def export_package(
    source: Path,
    output: Path,
    *,
    options: ExportOptions | None = None,
    progress: Progress | None = None,
    **changes: Any,
) -> ExportResult:
    """Turn a checkpoint into a package.

    Args:
        source: a GGUF file, or a Hugging Face folder with config.json and safetensors.
        output: the package folder to make.
        changes: fields of `ExportOptions`, over those of `options`.

    Raises:
        ConfigError: an option is unknown.
        CheckpointError: the source cannot be used.
        ExportError: the package cannot be written, its graph does not run, or it is further from
            the FP32 model than `quant_threshold`.
    """
    chosen = dataclasses.replace(options or ExportOptions(), **changes)
    chosen.check()
    report = progress or (lambda stage, done, total: None)
    with open_checkpoint(source) as checkpoint:
        spec = checked_spec(checkpoint)
        if chosen.stages > spec.num_layers:
            raise ConfigError("stages", chosen.stages, f"at most one a layer, {spec.num_layers}")
        check_rules(chosen.rules, weight_names(spec))
        tokenizer = Tokenizer.from_str(checkpoint.tokenizer.tokenizer_json)
        training = None
        if chosen.qat_text is not None:
            training = prepare_training(chosen, output, checkpoint.sha256, tokenizer, spec)
        with atomic_folder(output, overwrite=chosen.overwrite, keep=source) as folder:
            result = _Export(checkpoint, spec, tokenizer, folder, chosen, report, training).run()
        if training is not None:
            training.finish()
        return result


class _Export:
    """One export under way."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: DecoderSpec,
        tokenizer: Tokenizer,
        folder: Path,
        options: ExportOptions,
        progress: Progress,
        training: Training | None,
    ) -> None:
        self.checkpoint, self.spec, self.folder = checkpoint, spec, folder
        self.options, self.progress, self.training = options, progress, training
        self.tokenizer = tokenizer
        self.precision = find_precision(options.precision)
        self.forms = tuple(dict.fromkeys(options.forms))
        self.parts = decoder_parts(spec, checkpoint.tensors, self.precision)
        heads = frozenset((spec.embed, spec.head))
        self.plan = FormatPlan(self.precision, heads, tuple(options.rules))
        ranks = options.tensor_parallel
        self.shares = () if ranks is None else split_spec(spec, ranks)

    def run(self) -> ExportResult:
        targets: list[TargetInfo] = []
        kv_fidelity = fidelity = None
        if CPU_TARGET in self.options.targets:
            with tempfile.TemporaryDirectory(prefix="calibrate-", dir=self.folder) as scratch:
                target, kv_fidelity, fidelity = self._write_measured(Path(scratch))
                check_graph(self.folder / target.graphs[0].file, self.spec.vocab_size)
                targets.append(self._split(target) if self.shares else target)
        targets += self._write_cuda_targets()
        tokenizer = self._write_tokenizer()
        report = precision_report(
            targets[0],
            self.plan,
            kv_fidelity,
            fidelity,
            self.options.threshold_nats,
            looked_up=None if self.spec.tied_embeddings else self.spec.embed,
            rotation=rotation_report(
                self.spec, wanted=self.precision.rotate and CPU_TARGET in self.options.targets
            ),
        )
        self._write_json("precision_report.json", report)
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            generator="headrace",
            model=_model_info(self.spec),
            source=SourceInfo(
                format=self.checkpoint.format,
                file=self.checkpoint.path.name,
                sha256=self.checkpoint.sha256(),
            ),
            tokenizer=tokenizer,
            targets=tuple(targets),
            files=list_files(self.folder, self.progress),
        )
        (self.folder / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
        return ExportResult(manifest, kv_fidelity, fidelity)

    def _write_cuda_targets(self) -> list[TargetInfo]:
        wanted = [CUDA_TARGETS[name] for name in self.options.targets if name in CUDA_TARGETS]
        plain = decoder_parts(self.spec, self.checkpoint.tensors, find_precision("fp32"))
        if not self.shares:
            return [write_cuda_target(t, plain, self.folder, self.progress) for t in wanted]
        return [
            write_rank_target(
                self.folder,
                cuda_target_info(target, self.spec),
                lambda target=target: cuda_parts(target, plain),  # type: ignore[misc]
                PAGED,
                self.shares,
                self.progress,
            )
            for target in wanted
        ]

    def _split(self, whole: TargetInfo) -> TargetInfo:
        """Ranks in place of a target for one process, which was measured."""
        shutil.rmtree(self.folder / whole.name)
        return write_rank_target(
            self.folder,
            whole,
            lambda: self._formatted(self.kv_scales),
            self.forms[0],
            self.shares,
            self.progress,
        )

    def _write_measured(self, scratch: Path) -> tuple[TargetInfo, Fidelity | None, Fidelity | None]:
        """Calibrate, choose formats, write, measure, and repair what is over the threshold."""
        wanted = self.options.kv_cache
        if not self.options.calibrate or (
            self.precision.name == "fp32" and wanted in ("auto", "fp32")
        ):
            return self._write_target(None), None, None
        source, text = self.checkpoint.tokenizer, self.options.calibration_text
        bos = source.bos_token_id if source.add_bos else None
        chunks = calibration_chunks(
            self.tokenizer, source.chat_template, self.spec, text, bos_token_id=bos
        )
        found = self._calibrate(chunks, scratch, grams=self.precision.gram_formats)
        if found.grams is not None:
            self.parts = with_grams(self.parts, found.grams)
        measurement = Measurement(self.plan, self.parts, chunks, scratch, self.progress)
        if self.precision.name == "int4":
            measurement.keep_sensitive()
        elif self.precision.measured:
            measurement.take_bargains()
        cache = found
        if self.training is not None:
            self.parts = self.training.run(self.parts, self.plan, found.reference, self.progress)
            cache = self._calibrate(chunks, scratch / "trained", grams=False)
        passed = cache.kv_fidelity is not None and cache.kv_fidelity.mean_kl_nats <= KV_GATE_NATS
        scales = cache.kv_scales if passed or wanted != "auto" else None
        for _ in range(_MAX_REPAIRS):
            target = self._write_target(scales)
            graph = self.folder / target.graphs[-1].file
            self.progress("measuring the package", 0, 1)
            fidelity = compare_graphs(found.reference, graph, chunks.held_out)
            self.progress("measuring the package", 1, 1)
            limit = self.options.threshold_nats
            if limit is None or fidelity.mean_kl_nats <= limit:
                return target, cache.kv_fidelity, fidelity
            if not self.precision.measured or not measurement.upgrade(fidelity.mean_kl_nats, limit):
                break
            shutil.rmtree(self.folder / self.precision.target)
        if not self.options.force:
            added = None if scales is None else cache.kv_fidelity
            alone = "" if added is None else f" (the cache adds {added.mean_kl_nats:.4f})"
            raise ExportError(
                f"quant_threshold {limit} nats cannot be met: the package is "
                f"{fidelity.mean_kl_nats:.4f} nats from the FP32 model{alone}; raise it, choose "
                "another precision or --kv-cache fp32, or --force"
            )
        return target, cache.kv_fidelity, fidelity

    def _calibrate(self, chunks: CalibrationChunks, folder: Path, *, grams: bool) -> Calibration:
        folder.mkdir(exist_ok=True)
        bits = {"fp32": None, "int4": 4}.get(self.options.kv_cache, 8)
        done = 0

        def advance() -> None:
            nonlocal done
            done += 1
            self.progress("calibrating", done, total)

        total = len(chunks.seen) + (len(chunks.held_out) if bits is not None else 0)
        self.progress("calibrating", 0, total)
        return calibrate(self.parts, chunks, folder, kv_bits=bits, grams=grams, advance=advance)

    def _formatted(self, scales: KvScales | None) -> DecoderParts:
        fmt = self.plan.make()
        for name in mixed_readers(self.spec):
            fmt.mix_inputs_of(name)
        return dataclasses.replace(self.parts, layer_format=fmt, head_format=fmt, kv_scales=scales)

    def _write_target(self, scales: KvScales | None) -> TargetInfo:
        self.kv_scales, parts = scales, self._formatted(scales)
        name = self.precision.target
        folder = self.folder / name
        folder.mkdir()
        graphs = []
        total = len(self.forms) * self.spec.num_layers
        with WeightStore(folder, WEIGHTS_FILE) as store:
            for i, form in enumerate(self.forms):
                before = i * self.spec.num_layers
                model = build_decoder(
                    parts,
                    store,
                    form,
                    lambda layers, before=before: self.progress(  # type: ignore[misc]
                        "writing layers", before + layers, total
                    ),
                )
                ir.save(model, folder / f"{form}.onnx")
                graphs.append(graph_info(model, form, f"{name}/{form}.onnx"))
            tensors = tensor_infos(store)
            if self.options.stages > 1:
                layers = stage_layers(self.spec, tensors, self.options.stages)
                graphs = [self._write_stages(parts, store, graph, layers) for graph in graphs]
            size = store.size_bytes
        bits = None if parts.kv_scales is None else parts.kv_scales.bits
        values = 2 * self.spec.num_layers * self.spec.num_kv_heads * self.spec.head_dim
        return TargetInfo(
            name=name,
            device="cpu",
            precision=self.precision.name,
            kv_cache=KvCacheInfo(
                dtype=_KV_DTYPES[bits], bytes_per_token=values * (bits or 32) // 8
            ),
            graphs=tuple(graphs),
            tensors=tensors,
            weight_bytes=size,
        )

    def _write_stages(
        self, parts: DecoderParts, store: WeightStore, graph: GraphInfo, layers: list[range]
    ) -> GraphInfo:
        stages = []
        for number, part in enumerate(layers):
            model = build_decoder(parts, store, graph.form, layers=part)
            file = f"{self.precision.target}/{graph.form}.{number + 1}of{len(layers)}.onnx"
            ir.save(model, self.folder / file)
            stages.append(graph_info(model, graph.form, file))
        return dataclasses.replace(graph, stages=tuple(stages))

    def _write_tokenizer(self) -> TokenizerInfo:
        source = self.checkpoint.tokenizer
        (self.folder / "tokenizer.json").write_text(source.tokenizer_json, encoding="utf-8")
        template = None
        if source.chat_template is not None:
            template = "chat_template.jinja"
            (self.folder / template).write_text(source.chat_template, encoding="utf-8")
        self._write_json("generation_config.json", source.generation_config)
        return TokenizerInfo(
            file="tokenizer.json",
            bos_token_id=source.bos_token_id,
            eos_token_ids=source.eos_token_ids,
            add_bos=source.add_bos,
            chat_template=template,
            golden=golden_texts(self.tokenizer),
        )

    def _write_json(self, name: str, value: object) -> None:
        text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
        (self.folder / name).write_text(text, encoding="utf-8")


def list_files(folder: Path, progress: Progress) -> tuple[FileInfo, ...]:
    """Every file in the folder with its size and hash."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    infos = []
    for i, path in enumerate(files):
        progress("hashing files", i, len(files))
        relative = path.relative_to(folder).as_posix()
        size = path.stat().st_size
        infos.append(FileInfo(path=relative, bytes=size, sha256=file_sha256(path)))
    progress("hashing files", len(files), len(files))
    return tuple(infos)


def _model_info(spec: DecoderSpec) -> ModelInfo:
    return ModelInfo(**{f.name: getattr(spec, f.name) for f in dataclasses.fields(ModelInfo)})
