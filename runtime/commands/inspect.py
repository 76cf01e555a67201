"""What a package holds, from its manifest: `headrace inspect`."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from headrace.runtime.commands.inspect_encoder import render_encoder, summarize_encoder
from headrace.runtime.manifest import (
    ENCODER_KIND,
    HEAD_MATRIX,
    ModelInfo,
    TargetInfo,
    is_encoder_package,
    read_manifest,
)

_KV_TOKENS = 2048


def summarize(folder: Path, *, verify: bool = False) -> dict[str, Any]:
    """Plain data about a package. `verify` also reads every file and compares its hash.

    Raises:
        PackageError: it cannot be read, or with `verify` was changed.
    """
    if is_encoder_package(folder):
        return summarize_encoder(folder, verify=verify)
    manifest = read_manifest(folder, verify_hashes=verify)
    return {
        "schema_version": manifest.schema_version,
        "generator": manifest.generator,
        "verified": verify,
        "source": dataclasses.asdict(manifest.source),
        "model": dataclasses.asdict(manifest.model),
        "chat_template": manifest.tokenizer.chat_template is not None,
        "targets": [_target(target, manifest.model) for target in manifest.targets],
        "files": [{"path": info.path, "bytes": info.bytes} for info in manifest.files],
    }


def _target(target: TargetInfo, model: ModelInfo) -> dict[str, Any]:
    by_format: dict[str, list[int]] = defaultdict(list)
    for tensor in target.tensors:
        by_format[tensor.format].append(tensor.bytes)
    return {
        "name": target.name,
        "device": target.device,
        "precision": target.precision,
        "weight_bytes": target.weight_bytes,
        "formats": {
            name: {"tensors": len(sizes), "bytes": sum(sizes)}
            for name, sizes in sorted(by_format.items(), key=lambda item: -sum(item[1]))
        },
        "kv_cache": dataclasses.asdict(target.kv_cache),
        "against_fp16": _against_fp16(target, model),
        "graphs": [
            {"form": g.form, "file": g.file, "min_onnxruntime": g.min_onnxruntime}
            for g in target.graphs
        ],
        "ranks": [
            {
                "num_heads": rank.num_heads,
                "num_kv_heads": rank.num_kv_heads,
                "num_tokens": rank.num_tokens,
                "weight_bytes": rank.weight_bytes,
            }
            for rank in target.ranks
        ],
    }


def _against_fp16(target: TargetInfo, model: ModelInfo) -> dict[str, Any]:
    """Bytes of weights and one sequence's KV, and what they would be with 16 bits a value."""
    tokens = min(_KV_TOKENS, model.context_tokens)
    # A rotated head has a matrix of its own, which an FP16 package would not need.
    shapes = [tensor.shape for tensor in target.tensors if tensor.name != HEAD_MATRIX]
    cached = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    ours = target.weight_bytes + tokens * target.kv_cache.bytes_per_token
    fp16 = 2 * (sum(math.prod(shape) for shape in shapes) + tokens * cached)
    return {"kv_tokens": tokens, "bytes": ours, "fp16_bytes": fp16, "saved_share": 1 - ours / fp16}


def render(summary: dict[str, Any]) -> str:
    """`summarize`'s data for people."""
    if summary.get("kind") == ENCODER_KIND:
        return render_encoder(summary)
    model, source = summary["model"], summary["source"]
    lines = [
        f"model      {model['architecture']}: {model['num_layers']} layers, "
        f"hidden {model['hidden_size']}, {model['num_heads']} heads "
        f"({model['num_kv_heads']} KV) of {model['head_dim']}, vocabulary {model['vocab_size']}, "
        f"context {model['context_tokens']}",
        f"source     {source['file']} ({source['format']})",
        f"made by    {summary['generator']}, schema {summary['schema_version']}",
        f"chat       {'has a template' if summary['chat_template'] else 'no template'}",
    ]
    for target in summary["targets"]:
        lines += _render_target(target)
    files = summary["files"]
    state = "all hashes match" if summary["verified"] else "sizes match; --verify checks hashes"
    lines.append(f"files      {len(files)}, {_megabytes(sum(f['bytes'] for f in files))} ({state})")
    lines += [f"  {info['path']:40} {_megabytes(info['bytes']):>10}" for info in files]
    return "\n".join(lines)


def _render_target(target: dict[str, Any]) -> list[str]:
    kv = target["kv_cache"]
    lines = [
        f"target     {target['name']}: {target['precision']} for {target['device']}, "
        f"weights {_megabytes(target['weight_bytes'])}",
        f"  KV cache {kv['dtype']}, {kv['bytes_per_token']:,} bytes a token",
    ]
    against = target["against_fp16"]
    lines.append(
        f"  with {against['kv_tokens']:,} tokens of KV {_megabytes(against['bytes'])}: "
        f"{against['saved_share']:.1%} less than {_megabytes(against['fp16_bytes'])} in FP16"
    )
    for name, share in target["formats"].items():
        lines.append(f"  {name:14} {share['tensors']:4} tensors {_megabytes(share['bytes']):>10}")
    for number, rank in enumerate(target["ranks"]):
        lines.append(
            f"  rank {number}   {rank['num_heads']} heads ({rank['num_kv_heads']} KV), "
            f"{rank['num_tokens']} tokens, weights {_megabytes(rank['weight_bytes'])}"
        )
    for graph in target["graphs"]:
        lines.append(
            f"  graph    {graph['form']:8} {graph['file']}, onnxruntime {graph['min_onnxruntime']}+"
        )
    return lines


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
