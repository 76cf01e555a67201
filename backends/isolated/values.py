"""What crosses the pipe between an engine and its backend's process, as frames.

`StepPlan` and `StepOutput`, `Capabilities`, and errors. Numbers and short lists go into the header,
arrays and keys and values into the body. Readers take nothing on trust: what does not fit is an
`EngineProcessError`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.backends.base import Capabilities, Probabilities, StepOutput
from headrace.runtime import errors
from headrace.runtime.core import KvCopy, KvOp, KvRead, KvRelease, KvWrite, Row, StepPlan
from headrace.runtime.errors import EngineProcessError, HeadraceError
from headrace.runtime.manifest import PROBABILITY_BLOCK

Header = dict[str, Any]
T = TypeVar("T")

_OPS: dict[str, type[KvOp]] = {
    "copy": KvCopy,
    "release": KvRelease,
    "read": KvRead,
    "write": KvWrite,
}
_OP_NAMES = {kind: name for name, kind in _OPS.items()}


def encode_plan(plan: StepPlan) -> tuple[Header, list[bytes]]:
    """Header and body; the body is what the plan's `KvWrite` operations write."""
    ops: list[list[Any]] = []
    body: list[bytes] = []
    for op in plan.kv_ops:
        values = [getattr(op, field.name) for field in dataclasses.fields(op)]
        if isinstance(op, KvWrite):
            body.append(op.data)
            values[-1] = len(op.data)
        ops.append([_OP_NAMES[type(op)], *values])
    return {"step": plan.step_id, "rows": plan.rows, "ops": ops}, body


def decode_plan(header: Mapping[str, Any], body: memoryview) -> StepPlan:
    """What `encode_plan` encoded.

    Raises:
        EngineProcessError: it did not.
    """

    def decode() -> StepPlan:
        rows = []
        for seq_id, slot, past_len, tokens, num_logits, inverse_temperature in header["rows"]:
            _counts(seq_id, slot, past_len, num_logits)
            _require(0 < len(tokens) >= num_logits)
            inverse = _real(inverse_temperature)
            rows.append(Row(seq_id, slot, past_len, _counts(*tokens), num_logits, inverse))
        ops: list[KvOp] = []
        done = 0
        for name, *values in header["ops"]:
            _counts(*values)
            if name == "write":
                slot, num_tokens, size = values
                _require(done + size <= len(body))
                ops.append(KvWrite(slot, num_tokens, bytes(body[done : done + size])))
                done += size
            else:
                ops.append(_OPS[name](*values))
        _require(done == len(body))
        (step_id,) = _counts(header["step"])
        return StepPlan(step_id, tuple(rows), tuple(ops))

    return _checked(decode)


def encode_output(output: StepOutput) -> tuple[Header, list[memoryview | bytes]]:
    """Header and body; the body is the arrays, then what was read of keys and values."""
    arrays = [output.logits, output.entropy_nats]
    if (given := output.probabilities) is not None:
        arrays += [given.values, given.block_maxima, given.block_sums]
    if output.hidden is not None:
        arrays.append(output.hidden)
    header = {
        "model_ms": output.model_ms,
        "num_logits": len(output.logits),
        "has_probabilities": given is not None,
        "reads": [len(read) for read in output.kv_reads],
    }
    views = [np.ascontiguousarray(array, np.float32).data for array in arrays if array.size]
    return header, [*views, *output.kv_reads]


def max_output_bytes(plan: StepPlan, caps: Capabilities) -> int:
    """How long the body of a step's output may be."""
    padded = -(-caps.vocab_size // PROBABILITY_BLOCK) * (PROBABILITY_BLOCK + 2)
    reads = sum(op.num_tokens for op in plan.kv_ops if isinstance(op, KvRead))
    floats = plan.num_logits * (caps.vocab_size + 1 + padded + caps.hidden_size)
    return 4 * floats + reads * caps.kv_bytes_per_token


def decode_output(header: Mapping[str, Any], body: memoryview, caps: Capabilities) -> StepOutput:
    """What `encode_output` encoded, as views of the body, which may be written to.

    Raises:
        EngineProcessError: it did not.
    """

    def decode() -> StepOutput:
        (num_logits,), model_ms = _counts(header["num_logits"]), _real(header["model_ms"])
        sizes = _counts(*header["reads"])
        done = 0

        def array(*shape: int) -> NDArray[np.float32]:
            nonlocal done
            count = math.prod(shape)
            found = np.frombuffer(body, np.float32, count, done) if count else np.empty(0, "f4")
            done += found.nbytes
            return found.reshape(shape)

        logits, entropy = array(num_logits, caps.vocab_size), array(num_logits)
        probabilities = None
        if header["has_probabilities"] is True:
            blocks = -(-caps.vocab_size // PROBABILITY_BLOCK)
            widths = (blocks * PROBABILITY_BLOCK, blocks, blocks)
            probabilities = Probabilities(*[array(num_logits, width) for width in widths])
        hidden = array(num_logits, caps.hidden_size) if caps.hidden_size else None
        reads = []
        for size in sizes:
            reads.append(bytes(body[done : done + size]))
            done += size
        _require(done == len(body))
        return StepOutput(logits, entropy, model_ms, probabilities, tuple(reads), hidden)

    return _checked(decode)


def encode_capabilities(caps: Capabilities) -> Header:
    return dataclasses.asdict(caps)


def decode_capabilities(values: Any) -> Capabilities:
    """What `encode_capabilities` encoded.

    Raises:
        EngineProcessError: it did not.
    """

    def decode() -> Capabilities:
        _require(isinstance(values, dict))
        caps = Capabilities(**values)
        for field in dataclasses.fields(caps):
            value = getattr(caps, field.name)
            may_be_nothing = value is False or value == field.default
            _require(type(value).__name__ == field.type and (may_be_nothing or bool(value)))
        return caps

    return _checked(decode)


def encode_error(error: HeadraceError) -> Header:
    """An error of the tree, with what its class adds to it."""
    plain = (int, float, str, bool, type(None))
    fields = {name: value for name, value in vars(error).items() if isinstance(value, plain)}
    return {"kind": type(error).__name__, "message": str(error), "fields": fields}


def decode_error(values: Any) -> HeadraceError:
    """What `encode_error` encoded.

    Raises:
        EngineProcessError: it did not.
    """

    def decode() -> HeadraceError:
        kind = getattr(errors, values["kind"])
        _require(issubclass(kind, HeadraceError))
        error: HeadraceError = kind.__new__(kind)  # its constructor would word the message again
        error.args = (str(values["message"]),)
        vars(error).update(values["fields"])
        return error

    return _checked(decode)


def _counts(*values: Any) -> tuple[int, ...]:
    """Whole numbers, none negative."""
    for value in values:
        _require(type(value) is int and value >= 0)
    return values


def _real(value: Any) -> float:
    _require(type(value) in (int, float) and not math.isnan(value))
    return float(value)


def _require(condition: bool) -> None:
    if not condition:
        raise EngineProcessError("sent what makes no sense")


def _checked(decode: Callable[[], T]) -> T:
    try:
        return decode()
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise EngineProcessError("sent what makes no sense") from None
