"""Frames between processes, and the values that cross: whole, or refused."""

from __future__ import annotations

import dataclasses
import io
import json
import struct
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.backends.base import Capabilities, Probabilities, StepOutput
from headrace.backends.fake import FakeBackend
from headrace.backends.isolated.values import (
    decode_capabilities,
    decode_error,
    decode_output,
    decode_plan,
    encode_capabilities,
    encode_error,
    encode_output,
    encode_plan,
    max_output_bytes,
)
from headrace.runtime import errors
from headrace.runtime.child.frames import MAX_HEADER_BYTES, Channel, Frame
from headrace.runtime.core import KvCopy, KvRead, KvRelease, KvWrite, Row, StepPlan
from headrace.runtime.errors import EngineProcessError

count = st.integers(0, 2**62)
counts = st.lists(count, min_size=1, max_size=5).map(tuple)
real = st.floats(0, allow_nan=False)
rows = counts.flatmap(
    lambda tokens: st.builds(
        Row, count, count, count, st.just(tokens), st.integers(0, len(tokens)), real
    )
)
ops = st.one_of(
    st.builds(KvCopy, count, count, count),
    st.builds(KvRelease, count),
    st.builds(KvRead, count, count),
    st.builds(KvWrite, count, count, st.binary(max_size=9)),
)
plans = st.builds(
    StepPlan, count, st.lists(rows, max_size=3).map(tuple), st.lists(ops, max_size=4).map(tuple)
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
CAPS = FakeBackend(vocab_size=130, context_tokens=100, gives_hidden=True).capabilities


class Trickle(io.BytesIO):
    """A pipe that takes and gives a few bytes at a time."""

    def readinto(self, buffer: Any) -> int:
        return super().readinto(memoryview(buffer)[:3])

    def write(self, data: Any) -> int:
        return super().write(memoryview(data)[:3])


def cross(header: dict[str, Any], body: list[Any]) -> Frame:
    """A frame as it comes out at the other end."""
    pipe = Trickle()
    Channel(io.BytesIO(), pipe).send(header, *body)
    pipe.seek(0)
    return Channel(pipe, io.BytesIO()).receive(1 << 20)


@given(header=st.dictionaries(st.text(), json_values), body=st.lists(st.binary(max_size=20)))
def test_frames_come_as_they_were_sent(header: dict[str, Any], body: list[bytes]) -> None:
    frame = cross(header, body)
    assert json.dumps(frame.header) == json.dumps(header)
    assert bytes(frame.body) == b"".join(body)


@given(data=st.binary(max_size=80))
def test_any_bytes_are_a_frame_or_refused(data: bytes) -> None:
    channel = Channel(io.BytesIO(data), io.BytesIO())
    with pytest.raises(EngineProcessError):
        while True:
            assert isinstance(channel.receive(16).header, dict)


@pytest.mark.parametrize(
    ("header", "body_bytes"),
    [(b"[]", 0), (b"{}", 17), (b"{", 0), (b"\xff\xfe", 0), (b"[" * 100_000, 0), (b'{"a":' * 9, 0)],
)
def test_wrong_frames_are_refused(header: bytes, body_bytes: int) -> None:
    data = struct.pack("<IQ", len(header), body_bytes) + header + b"x" * body_bytes
    with pytest.raises(EngineProcessError, match="no message"):
        Channel(io.BytesIO(data), io.BytesIO()).receive(16)


def test_no_memory_is_taken_for_what_is_too_long() -> None:
    for lengths in ((MAX_HEADER_BYTES + 1, 0), (2, 1 << 60)):
        with pytest.raises(EngineProcessError, match="no message"):
            Channel(io.BytesIO(struct.pack("<IQ", *lengths)), io.BytesIO()).receive(1 << 20)


@given(plan=plans)
def test_plans_cross(plan: StepPlan) -> None:
    frame = cross(*encode_plan(plan))
    assert decode_plan(frame.header, frame.body) == plan


@given(
    num_logits=st.integers(0, 3),
    sampled=st.booleans(),
    reads=st.lists(st.binary(max_size=9), max_size=3),
    model_ms=real,
)
def test_outputs_cross(num_logits: int, sampled: bool, reads: list[bytes], model_ms: float) -> None:
    generator = np.random.default_rng(num_logits)
    given = None
    if sampled:
        given = Probabilities.empty(num_logits, CAPS.vocab_size)
        for array in dataclasses.astuple(given):
            array[...] = generator.standard_normal(array.shape)
    logits = generator.standard_normal((num_logits, CAPS.vocab_size)).astype("f4")
    hidden = generator.standard_normal((num_logits, CAPS.hidden_size)).astype("f4")
    output = StepOutput(logits, logits[:, 0].copy(), model_ms, given, tuple(reads), hidden)
    frame = cross(*encode_output(output))
    again = decode_output(frame.header, frame.body, CAPS)
    assert (again.model_ms, again.kv_reads) == (model_ms, output.kv_reads)
    np.testing.assert_equal(again.logits, logits)
    np.testing.assert_equal(again.entropy_nats, output.entropy_nats)
    np.testing.assert_equal(again.hidden, hidden)
    assert again.logits.flags.writeable
    assert (again.probabilities is None) == (given is None)
    if again.probabilities is not None and given is not None:
        for one, other in zip(
            dataclasses.astuple(again.probabilities), dataclasses.astuple(given), strict=True
        ):
            np.testing.assert_equal(one, other)


def test_the_longest_output_is_known() -> None:
    plan = StepPlan(0, (Row(0, 0, 0, (1, 2), 2, 1.0),), (KvRead(0, 5),))
    given = Probabilities.empty(2, CAPS.vocab_size)
    logits = np.zeros((2, CAPS.vocab_size), "f4")
    output = StepOutput(logits, logits[:, 0].copy(), 1.0, given, (bytes(5 * 4),), logits[:, :100])
    _, body = encode_output(output)
    assert sum(memoryview(piece).nbytes for piece in body) == max_output_bytes(plan, CAPS)


def test_capabilities_cross() -> None:
    for caps in (CAPS, dataclasses.replace(CAPS, hidden_size=0)):
        assert decode_capabilities(cross(encode_capabilities(caps), []).header) == caps


every_error = [
    errors.ConfigError("device", "x", "one of cpu, cuda"),
    errors.InsufficientMemoryError(2**30, 2**20, "close other programs"),
    errors.PromptTooLongError(9, 8),
    errors.PackageError("it is damaged"),
    errors.BackendUnavailableError("no card"),
]


@pytest.mark.parametrize("error", every_error, ids=lambda error: type(error).__name__)
def test_errors_cross(error: errors.HeadraceError) -> None:
    again = decode_error(cross(encode_error(error), []).header)
    assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)


keys = sorted(
    {"step", "rows", "ops", "model_ms", "num_logits", "has_probabilities", "reads"}
    | {"kind", "message", "fields"}
    | {field.name for field in dataclasses.fields(Capabilities)}
)


@given(
    header=st.dictionaries(st.sampled_from(keys), json_values) | json_values,
    body=st.binary(max_size=64),
)
def test_anything_else_is_refused(header: Any, body: bytes) -> None:
    view = memoryview(bytearray(body))
    for decode in (
        lambda: decode_plan(header, view),
        lambda: decode_output(header, view, CAPS),
        lambda: decode_capabilities(header),
        lambda: decode_error(header),
    ):
        with suppress(EngineProcessError):
            decode()
