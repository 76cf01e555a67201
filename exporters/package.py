"""Write a package: graphs, weights, tokenizer, manifest.

Everything is written to a temporary folder beside the output and renamed when complete, so a
failure leaves nothing half-written and an existing package is replaced as a whole.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import onnx_ir as ir
from tokenizers import Tokenizer

from headrace.exporters.archs.registry import decoder_spec
from headrace.exporters.archs.spec import DecoderSpec
from headrace.exporters.archs.tensors import check_tensors
from headrace.exporters.atomic_folder import atomic_folder
from headrace.exporters.calibrate import KV_GATE_NATS, calibrate_kv, calibration_chunks
from headrace.exporters.checkpoint.golden import golden_texts
from headrace.exporters.checkpoint.source import Checkpoint, open_checkpoint
from headrace.exporters.graph.decoder import FORMS, DecoderParts, KvScales, build_decoder
from headrace.exporters.graph.rope import inverse_frequencies
from headrace.exporters.graph.weights import WeightStore
from headrace.exporters.precision import DEFAULT_PRECISION, Precision, find_precision
from headrace.exporters.rotation import RotatedSource
from headrace.exporters.validate import Fidelity, check_graph
from headrace.exporters.weight_source import WeightSource
from headrace.runtime.errors import CheckpointError, ConfigError
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
    TensorInfo,
    TokenizerInfo,
    file_sha256,
)

DEFAULT_FORMS = ("ragged", "uniform")
KV_CACHES = ("auto", "int8", "fp32")
_MIN_ONNXRUNTIME = {"ragged": "1.32", "tree": "1.32", "uniform": "1.31"}
_WEIGHTS_FILE = "weights.bin"


class Progress(Protocol):
    """Hears how an export gets on."""

    def __call__(self, stage: str, done: int, total: int) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class ExportResult:
    """What was written. `kv_fidelity` is None where the cache was not calibrated."""

    manifest: Manifest
    kv_fidelity: Fidelity | None


def export_package(
    source: Path,
    output: Path,
    *,
    precision: str = DEFAULT_PRECISION,
    kv_cache: str = "auto",
    forms: Sequence[str] = DEFAULT_FORMS,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ExportResult:
    """Turn a checkpoint into a package.

    Args:
        source: a GGUF file, or a Hugging Face folder with config.json and safetensors.
        output: the package folder to make.
        precision: a name of `precision.PRECISIONS`.
        kv_cache: "int8", "fp32", or "auto": INT8 if it adds at most `KV_GATE_NATS`, and fp32 for
            an fp32 package. What INT8 adds is measured and reported either way.
        forms: of `graph.decoder.FORMS`.
        overwrite: replace an existing package.

    Raises:
        ConfigError: an option is unknown.
        CheckpointError: the source cannot be used.
        ExportError: the package cannot be written, or its graph does not run.
    """
    chosen = find_precision(precision)
    if kv_cache not in KV_CACHES:
        raise ConfigError("kv_cache", kv_cache, f"one of {', '.join(KV_CACHES)}")
    if not forms or (unknown := [form for form in forms if form not in FORMS]):
        raise ConfigError("form", forms and unknown[0], f"one or more of {', '.join(FORMS)}")
    report = progress or (lambda stage, done, total: None)
    with open_checkpoint(source) as checkpoint:
        spec = _checked_spec(checkpoint)
        with atomic_folder(output, overwrite=overwrite, keep=source) as folder:
            return _Export(
                checkpoint, spec, folder, chosen, tuple(dict.fromkeys(forms)), report
            ).run(kv_cache)


class _Export:
    """One export under way."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: DecoderSpec,
        folder: Path,
        precision: Precision,
        forms: tuple[str, ...],
        progress: Progress,
    ) -> None:
        self.checkpoint, self.spec, self.folder = checkpoint, spec, folder
        self.precision, self.forms, self.progress = precision, forms, progress
        self.tokenizer = Tokenizer.from_str(checkpoint.tokenizer.tokenizer_json)
        self.parts = _decoder_parts(self.spec, WeightSource(checkpoint), precision)

    def run(self, kv_cache: str) -> ExportResult:
        scales, fidelity = self._kv_scales(kv_cache)
        target = self._write_target(dataclasses.replace(self.parts, kv_scales=scales))
        check_graph(self.folder / target.graphs[0].file, self.spec.vocab_size)
        tokenizer = self._write_tokenizer()
        self._write_json("precision_report.json", self._report(target, fidelity))
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
            targets=(target,),
            files=self._list_files(),
        )
        (self.folder / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
        return ExportResult(manifest, fidelity)

    def _kv_scales(self, kv_cache: str) -> tuple[KvScales | None, Fidelity | None]:
        if kv_cache == "fp32" or (kv_cache == "auto" and self.precision.name == "fp32"):
            return None, None
        template = self.checkpoint.tokenizer.chat_template
        chunks = calibration_chunks(self.tokenizer, template, self.spec)
        done = 0

        def advance() -> None:
            nonlocal done
            done += 1
            self.progress("calibrating the KV cache", done, len(chunks))

        self.progress("calibrating the KV cache", 0, len(chunks))
        with tempfile.TemporaryDirectory(prefix="calibrate-", dir=self.folder) as scratch:
            scales, fidelity = calibrate_kv(self.parts, chunks, Path(scratch), advance)
        passed = fidelity.mean_kl_nats <= KV_GATE_NATS
        return (scales if passed or kv_cache == "int8" else None), fidelity

    def _write_target(self, parts: DecoderParts) -> TargetInfo:
        name = self.precision.target
        folder = self.folder / name
        folder.mkdir()
        graphs = []
        total = len(self.forms) * self.spec.num_layers
        with WeightStore(folder, _WEIGHTS_FILE) as store:
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
                graphs.append(_graph_info(model, form, f"{name}/{form}.onnx"))
            described, size = store.described(), store.size_bytes
        kv_dtype = "float32" if parts.kv_scales is None else "int8"
        values = 2 * self.spec.num_layers * self.spec.num_kv_heads * self.spec.head_dim
        return TargetInfo(
            name=name,
            device="cpu",
            precision=self.precision.name,
            kv_cache=KvCacheInfo(
                dtype=kv_dtype, bytes_per_token=values * (4 if kv_dtype == "float32" else 1)
            ),
            graphs=tuple(graphs),
            tensors=tuple(
                TensorInfo(name=n, format=fmt, shape=shape, bytes=nbytes)
                for n, fmt, shape, nbytes in described
            ),
            weight_bytes=size,
        )

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

    def _report(self, target: TargetInfo, fidelity: Fidelity | None) -> dict[str, Any]:
        return {
            "precision": self.precision.name,
            "weight_bytes": target.weight_bytes,
            "kv_cache": {
                "dtype": target.kv_cache.dtype,
                "gate_nats": KV_GATE_NATS,
                "added": None if fidelity is None else dataclasses.asdict(fidelity),
            },
        }

    def _write_json(self, name: str, value: object) -> None:
        text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
        (self.folder / name).write_text(text, encoding="utf-8")

    def _list_files(self) -> tuple[FileInfo, ...]:
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        infos = []
        for i, path in enumerate(files):
            self.progress("hashing files", i, len(files))
            relative = path.relative_to(self.folder).as_posix()
            size = path.stat().st_size
            infos.append(FileInfo(path=relative, bytes=size, sha256=file_sha256(path)))
        self.progress("hashing files", len(files), len(files))
        return tuple(infos)


def _checked_spec(checkpoint: Checkpoint) -> DecoderSpec:
    """Whatever can be found wrong before work starts."""
    spec = decoder_spec(checkpoint.config)
    check_tensors(spec, checkpoint.tensors)
    inverse_frequencies(spec)
    tokenizer = checkpoint.tokenizer
    bos = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
    if beyond := [i for i in (*bos, *tokenizer.eos_token_ids) if i >= spec.vocab_size]:
        raise CheckpointError(
            f"{checkpoint.path}: token {beyond[0]} begins or ends texts, but the embedding has "
            f"{spec.vocab_size} rows; correct the checkpoint's configuration"
        )
    return spec


def _decoder_parts(spec: DecoderSpec, plain: WeightSource, precision: Precision) -> DecoderParts:
    fmt = precision.make()
    rotated = RotatedSource(plain, spec) if precision.rotate else None
    source = rotated or plain
    return DecoderParts(
        spec=spec,
        weight=source.weight,
        vector=source.vector,
        layer_format=fmt,
        head_format=fmt,
        kv_scales=None,
        head_matrix=(
            (lambda: rotated.tied_head_matrix) if rotated and spec.tied_embeddings else None
        ),
    )


def _model_info(spec: DecoderSpec) -> ModelInfo:
    return ModelInfo(**{f.name: getattr(spec, f.name) for f in dataclasses.fields(ModelInfo)})


def _graph_info(model: ir.Model, form: str, file: str) -> GraphInfo:
    def plain(values: Sequence[ir.Value]) -> tuple[str, ...]:
        names = [value.name or "" for value in values]
        return tuple(n for n in names if not n.startswith(("past_", "present_")))

    return GraphInfo(
        form=form,
        file=file,
        min_onnxruntime=_MIN_ONNXRUNTIME[form],
        inputs=plain(model.graph.inputs),
        outputs=plain(model.graph.outputs),
    )
