"""What an encoder package holds: `headrace inspect`'s part for those."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path
from typing import Any

from headrace.runtime.encoder.manifest import EncoderTargetInfo, read_encoder_manifest


def summarize_encoder(folder: Path, *, verify: bool) -> dict[str, Any]:
    """Plain data about an encoder package; see `inspect.summarize`."""
    manifest = read_encoder_manifest(folder, verify_hashes=verify)
    return {
        "schema_version": manifest.schema_version,
        "kind": manifest.kind,
        "generator": manifest.generator,
        "verified": verify,
        "source": dataclasses.asdict(manifest.source),
        "model": dataclasses.asdict(manifest.model),
        "pooling": dataclasses.asdict(manifest.pooling),
        "targets": [_target(target) for target in manifest.targets],
        "files": [{"path": info.path, "bytes": info.bytes} for info in manifest.files],
    }


def _target(target: EncoderTargetInfo) -> dict[str, Any]:
    sizes: dict[str, list[int]] = defaultdict(list)
    for tensor in target.tensors:
        sizes[tensor.format].append(tensor.bytes)
    return {
        "name": target.name,
        "device": target.device,
        "precision": target.precision,
        "weight_bytes": target.weight_bytes,
        "formats": {
            name: {"tensors": len(found), "bytes": sum(found)}
            for name, found in sorted(sizes.items(), key=lambda item: -sum(item[1]))
        },
        "graphs": [{"file": target.file, "min_onnxruntime": target.min_onnxruntime}],
    }


def render_encoder(summary: dict[str, Any]) -> str:
    """`summarize_encoder`'s data for people."""
    model, source, pooling = summary["model"], summary["source"], summary["pooling"]
    stated = "" if pooling["stated"] else " (the checkpoint states none)"
    unit = "" if pooling["normalize"] else "not "
    files = summary["files"]
    state = "all hashes match" if summary["verified"] else "sizes match; --verify checks hashes"
    lines = [
        f"model      {model['architecture']} encoder: {model['num_layers']} layers, "
        f"hidden {model['hidden_size']}, {model['num_heads']} heads, "
        f"vocabulary {model['vocab_size']}, {model['max_tokens']} tokens at most",
        f"pooling    {pooling['mode']}{stated}, {unit}normalized",
        f"source     {source['file']} ({source['format']})",
        f"made by    {summary['generator']}, schema {summary['schema_version']}",
    ]
    for target in summary["targets"]:
        graph = target["graphs"][0]
        lines.append(
            f"target     {target['name']}: {target['precision']} for {target['device']}, "
            f"weights {_megabytes(target['weight_bytes'])}, "
            f"onnxruntime {graph['min_onnxruntime']}+"
        )
        lines += [
            f"  {name:14} {share['tensors']:4} tensors {_megabytes(share['bytes']):>10}"
            for name, share in target["formats"].items()
        ]
    lines.append(f"files      {len(files)}, {_megabytes(sum(f['bytes'] for f in files))} ({state})")
    lines += [f"  {info['path']:40} {_megabytes(info['bytes']):>10}" for info in files]
    return "\n".join(lines)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
