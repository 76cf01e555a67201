"""`precision_report.json`: what each weight got, what it costs, and how good the whole is."""

from __future__ import annotations

import dataclasses
from typing import Any

from headrace.exporters.calibrate import KV_GATE_NATS
from headrace.exporters.measured import FormatPlan
from headrace.runtime.fidelity import Fidelity
from headrace.runtime.manifest import TargetInfo


def precision_report(
    target: TargetInfo,
    plan: FormatPlan,
    kv_fidelity: Fidelity | None,
    fidelity: Fidelity | None,
    threshold_nats: float | None,
    looked_up: str | None,
    rotation: dict[str, Any],
) -> dict[str, Any]:
    """Plain data.

    `rotation` is what `rotation.rotation_report` says. `looked_up` is the name of an embedding that
    is not the head, too. `mean_kl_nats` of a tensor is what its format alone costs, None where that
    was not measured.
    """
    return {
        "precision": target.precision,
        "quant_threshold_nats": threshold_nats,
        "joint": None if fidelity is None else fidelity.to_dict(),
        "weight_bytes": target.weight_bytes,
        "rotation": rotation,
        "matmul_flops_share": flops_share(target, looked_up),
        "kv_cache": {
            "dtype": target.kv_cache.dtype,
            "gate_nats": KV_GATE_NATS,
            "added": None if kv_fidelity is None else kv_fidelity.to_dict(),
        },
        "tensors": [
            {**dataclasses.asdict(tensor), "mean_kl_nats": _nats_of(plan, tensor.name)}
            for tensor in target.tensors
        ],
    }


def flops_share(target: TargetInfo, looked_up: str | None) -> dict[str, float]:
    """Share of each format in the products of a token whose logits are wanted."""
    products: dict[str, int] = {}
    for tensor in target.tensors:
        if len(tensor.shape) == 2 and tensor.name != looked_up:
            size = tensor.shape[0] * tensor.shape[1]
            products[tensor.format] = products.get(tensor.format, 0) + size
    total = sum(products.values())
    return {name: size / total for name, size in sorted(products.items())}


def _nats_of(plan: FormatPlan, tensor_name: str) -> float | None:
    """Gate and up may be stored apart and are measured together."""
    for name in plan.sensitivity:
        if tensor_name == name or tensor_name in name.split("+"):
            return plan.nats_of(name)
    return None
