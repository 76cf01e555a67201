"""Add Medusa heads to a package that is there already.

Their files get names of their own and the manifest is replaced last, so that an interruption leaves
the package as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import onnx_ir as ir

from headrace.exporters.checkpoint.source import Checkpoint, open_checkpoint
from headrace.exporters.graph.decoder import DecoderParts
from headrace.exporters.graph.weights import WeightStore
from headrace.exporters.heads.checkpoint import WEIGHTS_FILE, Heads, read_heads
from headrace.exporters.heads.graph import build_heads
from headrace.exporters.model import checked_spec, decoder_parts
from headrace.exporters.precision import FORMATS, find_precision
from headrace.runtime.errors import CheckpointError, ExportError
from headrace.runtime.manifest import (
    MANIFEST_FILE,
    FileInfo,
    HeadsInfo,
    Manifest,
    SourceInfo,
    TargetInfo,
    file_sha256,
    read_manifest,
)


def add_heads(source: Path, package: Path, folder: Path) -> Manifest:
    """Put the heads in `folder` into each CPU target of `package`, which was made from `source`.

    Heads that are there are replaced.

    Raises:
        CheckpointError: the heads or the source cannot be used, or are of another model.
        PackageError: `package` is none.
        ExportError: it has no CPU target, or cannot be written.
    """
    manifest = read_manifest(package)
    with open_package_source(source, package, manifest) as checkpoint:
        model = manifest.model
        heads = read_heads(folder, model.hidden_size, model.vocab_size)
        digest = file_sha256(folder / WEIGHTS_FILE)
        found = SourceInfo(format="medusa", file=WEIGHTS_FILE, sha256=digest)
        old = [t.heads.file for t in manifest.targets if t.heads is not None]
        targets, files = [], []
        try:
            for target in manifest.targets:
                if target.device == "cpu" and not target.ranks:
                    parts = package_parts(checkpoint, target)
                    target, added = _write(package, target, parts, heads, found)
                    files += added
                targets.append(target)
            return _replace(package, manifest, targets, files, old)
        except OSError as error:
            raise ExportError(f"cannot write {package}: {error}") from None


def open_package_source(source: Path, package: Path, manifest: Manifest) -> Checkpoint:
    """Open the checkpoint that a package was made from.

    Raises:
        CheckpointError: it cannot be used or is another one.
    """
    checkpoint = open_checkpoint(source)
    if checkpoint.sha256() != manifest.source.sha256:
        checkpoint.close()
        raise CheckpointError(
            f"{source} is not what {package} was made from ({manifest.source.file}); give that"
        )
    return checkpoint


def package_parts(checkpoint: Checkpoint, target: TargetInfo) -> DecoderParts:
    """The decoder of a target: its weights in the basis of its graphs."""
    return decoder_parts(
        checked_spec(checkpoint), checkpoint.tensors, find_precision(target.precision)
    )


def _write(
    package: Path, target: TargetInfo, parts: DecoderParts, heads: Heads, source: SourceInfo
) -> tuple[TargetInfo, list[FileInfo]]:
    """Write graph and weights of the heads for one target."""
    precision = find_precision(target.precision)
    fmt = FORMATS[precision.head or precision.format]()
    folder, stem = package / target.name, f"heads-{source.sha256[:12]}"
    with WeightStore(folder, f"{stem}.bin") as store:
        model = build_heads(heads, parts, fmt, store)
        size = store.size_bytes
    graph = folder / f"{stem}.onnx"
    ir.save(model, graph)
    token_map = heads.token_map
    info = HeadsInfo(
        file=f"{target.name}/{graph.name}",
        num_heads=len(heads.heads),
        vocab_size=parts.spec.vocab_size if token_map is None else len(token_map),
        weight_bytes=size,
        source=source,
    )
    files = [
        FileInfo(
            path=f"{target.name}/{path.name}", bytes=path.stat().st_size, sha256=file_sha256(path)
        )
        for path in (graph, folder / f"{stem}.bin")
    ]
    return dataclasses.replace(target, heads=info), files


def _replace(
    package: Path,
    manifest: Manifest,
    targets: list[TargetInfo],
    files: list[FileInfo],
    old: list[str],
) -> Manifest:
    """Replace the manifest, then delete heads that it does not name any more."""
    if not files:
        raise ExportError(f"{package} has no CPU target, which heads are for")
    dropped = {name for graph in old for name in (graph, graph.removesuffix(".onnx") + ".bin")}
    kept = [f for f in manifest.files if f.path not in dropped]
    listed = sorted([*kept, *files], key=lambda info: info.path)
    new = dataclasses.replace(manifest, targets=tuple(targets), files=tuple(listed))
    partial = package / f"{MANIFEST_FILE}.partial"
    partial.write_text(new.to_json(), encoding="utf-8")
    partial.replace(package / MANIFEST_FILE)
    for name in dropped - {info.path for info in files}:
        with contextlib.suppress(OSError):
            (package / name).unlink()
    return new
