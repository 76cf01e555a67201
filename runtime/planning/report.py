"""Plans as values and as text: a model on given devices, or all models on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headrace.runtime.planning.devices import GIB, Device
from headrace.runtime.planning.estimate import ASSUMPTIONS, PRECISIONS, Fit, fit, step_ms
from headrace.runtime.planning.shapes import ModelShape, Share

_BATCHES = (1, 8, 32, 128)


def plan_model(
    shape: ModelShape, device: Device, count: int, context_tokens: int | None
) -> dict[str, Any]:
    """Every precision of a model on a group of devices.

    Args:
        context_tokens: of each sequence; the model's own, or 2,048 if that is longer.
    """
    context = context_tokens or min(shape.context_tokens, 2048)
    options = []
    for precision in PRECISIONS:
        found = fit(shape, device, count, precision)
        most = found.kv_tokens // context
        batches = sorted({batch for batch in (*_BATCHES, most) if 0 < batch <= most})
        options.append(
            {
                "precision": precision.name,
                "weight_bytes": list(found.weight_bytes),
                "kv_bytes_per_token": shape.kv_bytes_per_token(precision.kv_bits),
                "kv_bytes_per_token_and_rank": found.kv_bytes_per_token,
                "kv_scale_bytes": found.kv_scale_bytes,
                "activation_bytes": found.activation_bytes,
                "fits": found.fits,
                "kv_tokens": found.kv_tokens,
                "max_sequences": most,
                "tok_s": {str(b): _tok_s(shape, device, found, b, context) for b in batches},
            }
        )
    return {
        "model": shape.name,
        "parameters": shape.parameters,
        "device": device.name,
        "count": count,
        "context_tokens": context,
        "options": options,
        "assumptions": ASSUMPTIONS,
        "sources": [shape.source, device.source],
    }


def _tok_s(shape: ModelShape, device: Device, found: Fit, batch: int, context: int) -> float:
    ms = step_ms(shape, device, found, batch=batch, context_tokens=context)
    return round(1000 * batch / ms, 1)


def render_model(plan: dict[str, Any]) -> str:
    """`plan_model`'s result for people."""
    lines = [
        f"{plan['model']} ({plan['parameters'] / 1e9:.2f}B parameters) on {plan['count']} x "
        f"{plan['device']}, {plan['context_tokens']:,} tokens a sequence",
        "",
        f"{'':6}{'weights':>16}{'KV':>14}{'room for':>16}{'most':>11}   decode tok/s",
        f"{'':6}{'GiB a device':>16}{'bytes a token':>14}{'tokens of KV':>16}{'sequences':>11}"
        "   by sequences",
    ]
    for option in plan["options"]:
        start = (
            f"{option['precision']:6}{max(option['weight_bytes']) / GIB:16.2f}"
            f"{option['kv_bytes_per_token']:14,}"
        )
        if not option["fits"]:
            lines.append(f"{start}   does not fit")
            continue
        speeds = "  ".join(f"{batch}: {speed:,.0f}" for batch, speed in option["tok_s"].items())
        lines.append(
            f"{start}{option['kv_tokens']:16,}{option['max_sequences']:11,}   {speeds or '-'}"
        )
    lines += ["", f"Not measured. Assumed: {plan['assumptions']}."]
    lines.append(f"Sources: {'; '.join(plan['sources'])}.")
    return "\n".join(lines)


def plan_machine(shapes: Iterable[ModelShape], memory_bytes: int, context: int) -> dict[str, Any]:
    """Which models the memory of this machine's processors holds, as INT8 and as INT4, with one
    sequence of `context` tokens and room for a process."""
    models = []
    for shape in shapes:
        needs = {
            f"int{bits}": cpu_bytes(shape, bits, min(context, shape.context_tokens))
            for bits in (8, 4)
        }
        fitting = [name for name, needed in needs.items() if needed <= memory_bytes]
        models.append({"model": shape.name, "needs_bytes": needs, "fits": fitting})
    return {"memory_bytes": memory_bytes, "context_tokens": context, "models": models}


def cpu_bytes(shape: ModelShape, bits: int, context_tokens: int) -> int:
    """Weights with embedding and head in INT8 and a float32 scale a row, as packages for the CPU
    have them, INT8 KV of one sequence, and 256 MiB for the process."""
    share = Share(shape, 0, 1)
    *layers, head = share.products()
    num_bytes = sum(m.elements * bits // 8 + 4 * m.rows for m in layers)
    num_bytes += sum(m.elements + 4 * m.rows for m in (head, *share.tables()))
    num_bytes += 4 * share.vector_elements()
    return num_bytes + shape.kv_bytes_per_token(8) * context_tokens + (256 << 20)


def render_machine(plan: dict[str, Any]) -> str:
    """`plan_machine`'s result for people."""
    lines = [
        f"{plan['memory_bytes'] / GIB:.1f} GiB of memory are free; one sequence of "
        f"{plan['context_tokens']:,} tokens, INT8 cache",
        "",
        f"{'':18}{'INT8 GiB':>10}{'INT4 GiB':>10}",
    ]
    for model in plan["models"]:
        needs = model["needs_bytes"]
        verdict = "fits" if "int8" in model["fits"] else "INT4 fits" if model["fits"] else "-"
        lines.append(
            f"{model['model']:18}{needs['int8'] / GIB:10.2f}{needs['int4'] / GIB:10.2f}  {verdict}"
        )
    return "\n".join(lines)
